#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads what ptxas -v said during a build and holds it against the budget of each kernel.

usage: cuda_budget.py BUILD_LOG
"""
import re
import sys

# Kernel -> (registers, bytes of spill stores over its functions). Registers are what the blocks meant to share an
# SM leave; spills are what was seen on the worst architecture, rounded up.
BUDGET = {
    "FewRows": (80, 64),
    "ManyRows": (128, 256),
    "WideRows": (96, 512),
    "DecodeMatrix": (80, 64),
    "DenseRows": (168, 64),
    "PackRoutes": (64, 256),
    "RotateRows": (80, 64),
    "Boundary": (96, 64),
    "Combine": (96, 64),
    "StoreOutputs": (64, 64),
    "DecodeQuads": (80, 0),
}


def entries(text):
    """(kernel, architecture, registers, spill bytes) of every entry function; callees count with their entry."""
    kernel = architecture = None
    spills = 0
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(sm_\w+)'", line):
            kernel = next((name for name in BUDGET if name in match[1]), None)
            architecture = match[2]
            spills = 0
        elif kernel and (match := re.search(r"(\d+) bytes spill stores", line)):
            spills += int(match[1])
        elif kernel and (match := re.search(r"Used (\d+) registers", line)):
            yield kernel, architecture, int(match[1]), spills
            kernel = None


def main():
    with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
        found = list(entries(log.read()))
    failures = 0
    for kernel, architecture, registers, spills in sorted(set(found)):
        max_registers, max_spills = BUDGET[kernel]
        bad = registers > max_registers or spills > max_spills
        failures += bad
        print(f"{kernel:14} {architecture:8} {registers:4} of {max_registers} registers, "
              f"{spills:5} of {max_spills} bytes spilled{'  OVER BUDGET' if bad else ''}")
    missing = set(BUDGET) - {kernel for kernel, *_ in found}
    if missing:
        print("not in the log:", ", ".join(sorted(missing)))
    return 1 if failures or missing else 0


if __name__ == "__main__":
    sys.exit(main())
