#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-format-19 over every C++ file of the project: `format.sh -i` rewrites them,
# `format.sh --dry-run -Werror` checks them.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -d '' files < <(find include src cli python tests examples fuzz bench \
  \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -type f -print0 2>/dev/null | sort -z)
if ((${#files[@]} == 0)); then
  echo "format.sh: found no source file" >&2
  exit 1
fi
clang-format-19 "$@" "${files[@]}"
echo "clang-format-19 $*: ${#files[@]} files"
