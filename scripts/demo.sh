#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows the bundled checkpoint: what is in it, that it is whole, and that a program can think with it.
# Expects `make build` to have run.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release}

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

show "$build/espalier" inspect data/tiny-qwen3moe-exl3-mixed
show "$build/espalier" verify data/tiny-qwen3moe-exl3-mixed
show "$build/tiny_lm" data/tiny-qwen3moe-exl3-mixed data/heldout.txt
