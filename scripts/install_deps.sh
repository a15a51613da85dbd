#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian / Ubuntu packages that the project needs and that are not there yet.
#   scripts/install_deps.sh build        compiler, CMake, the libraries: all that `make demo` needs
#   scripts/install_deps.sh build test   also what `make test` needs
# Needs root or sudo only when something is missing. ESPALIER_SKIP_DEPS=1 makes it do nothing, for
# systems where the packages come from elsewhere.
set -euo pipefail

# "a|b": the first of the two that this release of the distribution has.
build_packages=(make g++ cmake ninja-build "pkgconf|pkg-config" libsimdjson-dev nlohmann-json3-dev
                libcli11-dev libfmt-dev libexpected-dev libssl-dev libre2-dev)
test_packages=(libgtest-dev libgmock-dev librapidcheck-dev libbenchmark-dev ccache clang-19 libclang-rt-19-dev llvm-19 clang-format-19 shellcheck
               codespell libopenmpi-dev openmpi-bin python3 python3-dev python3-venv ca-certificates)

die() {
  echo "install_deps.sh: $*" >&2
  exit 1
}

installed() {
  [[ $(dpkg-query -W -f='${db:Status-Abbrev}' "$1" 2>/dev/null) == ii* ]]
}

installable() {
  local candidate
  candidate=$(LC_ALL=C apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: //p')
  [[ -n $candidate && $candidate != "(none)" ]]
}

# Sorts "$@" into `missing` (names to install) and `unknown` (names that no package list has).
sort_out() {
  missing=()
  unknown=()
  local entry name names found
  for entry in "$@"; do
    IFS='|' read -ra names <<<"$entry"
    for name in "${names[@]}"; do
      if installed "$name"; then continue 2; fi
    done
    found=
    for name in "${names[@]}"; do
      if installable "$name"; then
        found=$name
        break
      fi
    done
    if [[ -n $found ]]; then
      missing+=("$found")
    else
      unknown+=("$entry")
    fi
  done
}

as_root() {
  if ((EUID == 0)); then
    env DEBIAN_FRONTEND=noninteractive "$@"
  elif command -v sudo >/dev/null; then
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else
    die "needs root or sudo to install: ${missing[*]} ${unknown[*]}"
  fi
}

apt_update() {
  as_root apt-get update -qq -o Acquire::Retries=3
}

apt_install() {
  as_root apt-get install -y -qq --no-install-recommends -o Acquire::Retries=3 \
    -o DPkg::Lock::Timeout=300 "${missing[@]}"
}

(($# > 0)) || die "usage: install_deps.sh build [test]"
wanted=()
for set_name in "$@"; do
  case $set_name in
    build) wanted+=("${build_packages[@]}") ;;
    test) wanted+=("${test_packages[@]}") ;;
    *) die "unknown set '$set_name'; there are: build test" ;;
  esac
done

if [[ ${ESPALIER_SKIP_DEPS:-} == 1 ]]; then
  echo "install_deps.sh: ESPALIER_SKIP_DEPS=1, nothing is installed"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  die "no apt-get here. Install by hand: ${wanted[*]} (Debian names); then set ESPALIER_SKIP_DEPS=1"
fi

sort_out "${wanted[@]}"
if ((${#missing[@]} == 0 && ${#unknown[@]} == 0)); then
  exit 0
fi
updated=
if ((${#unknown[@]} > 0)); then
  apt_update
  updated=1
  sort_out "${wanted[@]}"
fi
if ((${#unknown[@]} > 0)); then
  die "no package list of this system has: ${unknown[*]}
Debian 12, Debian 13 and Ubuntu 24.04 (with 'universe' and 'updates') have all of them."
fi

echo "Installing: ${missing[*]}"
# A stale package list names versions that the mirror has dropped: refresh it and try once more.
if ! apt_install; then
  [[ -z $updated ]] || die "apt-get could not install: ${missing[*]}"
  apt_update
  apt_install || die "apt-get could not install: ${missing[*]}"
fi
sort_out "${wanted[@]}"
((${#missing[@]} == 0)) || die "still missing after the installation: ${missing[*]}"
