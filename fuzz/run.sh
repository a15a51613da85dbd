#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# fuzz/run.sh TARGET SECONDS
#
# Runs one fuzzer, first on its committed corpus, then on what it makes of it. Works on a copy of the corpus,
# so the tree stays clean. A finding is kept in the build directory, and the exit status is not 0.
#
#   ESPALIER_FUZZ_BUILD    build directory, default build/fuzz
#   ESPALIER_FUZZ_MAX_LEN  longest input in bytes, default 16384
#   ESPALIER_FUZZ_WORKERS  processes, default 1
#   ESPALIER_FUZZ_KEEP     directory that receives the grown corpus, minimized; default: it is thrown away
set -euo pipefail

if (($# != 2)); then
  echo "usage: fuzz/run.sh TARGET SECONDS" >&2
  exit 2
fi
target=$1
seconds=$2
here=$(cd "$(dirname "$0")" && pwd)
build=${ESPALIER_FUZZ_BUILD:-$here/../build/fuzz}
binary=$build/fuzz/$target
corpus=$here/corpus/${target#fuzz_}
dictionary=$here/${target#fuzz_}.dict

if [[ ! -x $binary ]]; then
  echo "$binary is not built: cmake --preset fuzz && cmake --build --preset fuzz" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/corpus" "$build/findings"
if [[ -d $corpus ]]; then
  cp -r "$corpus/." "$work/corpus/"
fi

options=(-max_len="${ESPALIER_FUZZ_MAX_LEN:-16384}" -timeout=20 -rss_limit_mb=2500
         -artifact_prefix="$build/findings/$target-" -print_final_stats=1)
if [[ -f $dictionary ]]; then
  options+=(-dict="$dictionary")
fi
workers=${ESPALIER_FUZZ_WORKERS:-1}
if ((workers > 1)); then
  options+=(-fork="$workers")
fi
"$binary" "${options[@]}" -max_total_time="$seconds" "$work/corpus"

if [[ -n ${ESPALIER_FUZZ_KEEP:-} ]]; then
  mkdir -p "$ESPALIER_FUZZ_KEEP"
  # One process: with -fork, -merge=1 never ends.
  "$binary" -merge=1 "${options[@]}" -fork=0 "$ESPALIER_FUZZ_KEEP" "$work/corpus"
fi
