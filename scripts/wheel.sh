#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds a wheel for the CPU that installs on machines with neither a compiler nor our libraries:
#   scripts/wheel.sh                                 dist/espalier-...whl, everything compiled here
#   scripts/wheel.sh --out DIRECTORY --build BUILD   with library and command of a finished build folder
# It is built from the source distribution, which is put beside it. PYTHON names the interpreter that the wheel is for, python3 otherwise. The tools come from the package index.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
out=$root/dist
build=

while (($# > 0)); do
  case $1 in
    --out) out=$2 ;;
    --build) build=$2 ;;
    *)
      echo "usage: wheel.sh [--out DIRECTORY] [--build BUILD]" >&2
      exit 2
      ;;
  esac
  shift 2
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check --requirement "$root/scripts/wheel_tools.txt"

options=(-C cmake.define.ESPALIER_CUDA=OFF -C build-dir="$work/cmake")
if [[ -n $build ]]; then
  cmake --build "$build" --target espalier_cli_alone
  cmake --install "$build" --prefix "$work/prefix" >/dev/null
  cp "$build/alone/espalier" "$work/prefix/bin/espalier"
  options+=(-C cmake.define.ESPALIER_PREBUILT="$work/prefix" -C cmake.define.ESPALIER_WERROR=ON)
fi
# What the source distribution lacks is missed here.
(cd "$root" && "$work/tools/bin/python" -c \
  'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$work/source" >/dev/null)
"$work/tools/bin/pip" wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
  "${options[@]}" --wheel-dir "$work/raw" "$work"/source/espalier-*.tar.gz

# Copies the libraries of this distribution into the wheel and names the oldest glibc that it runs on.
mkdir -p "$out"
rm -f "$out"/espalier-*
cp "$work"/source/espalier-*.tar.gz "$out"
PATH=$work/tools/bin:$PATH auditwheel repair --wheel-dir "$out" "$work"/raw/espalier-*.whl
