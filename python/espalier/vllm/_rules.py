# SPDX-License-Identifier: Apache-2.0
"""Names and cuts: which tensors a layer of vLLM stands for, and which part of a matrix a rank runs. No vLLM, no torch.

Exceptions here are ValueError; the callers say which layer it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Input and output channels are cut on multiples of this: the blocks of the Hadamard transform.
BLOCK = 128

# Dense layers of a container that are plain tensors whatever its ignored_layers say.
ALWAYS_PLAIN = ("lm_head", "in_proj_gfab", "vision_tower", "vision_model", "mm_projector")

DENSE_FORMATS = ("mxfp8", "bf16")

# What only Espalier's loader reads, by the file's own names: parts of EXL3 matrices with their markers, the layer-wide
# vectors of rank-sliced and r7 packs, and the tensors of an exl3-v1 layer file. Biases are ordinary tensors.
PAYLOAD = re.compile(
    r"\.(trellis|suh|svh|su|sv|mcg|mul1)$"
    r"|\.r7_shared\.[a-z_]+$"
    r"|^(codes|rotations|gate_suh|up_suh|down_svh|sign_pattern)$"
)


def matches(entry: str, name: str) -> bool:
    """Whether a rule is about a layer: its path components, whole, stand behind each other in the layer's path.

    ``b_proj`` is not about ``x.kv_b_proj``; ``vision_tower`` is about everything inside it.
    """
    wanted, path = entry.split("."), name.split(".")
    return any(path[i : i + len(wanted)] == wanted for i in range(len(path) - len(wanted) + 1))


def is_plain(name: str, ignored: Iterable[str]) -> bool:
    """Whether a dense layer of a container with ``dense_format`` mxfp8 is left as plain tensors."""
    return any(matches(entry, name) for entry in (*ALWAYS_PLAIN, *ignored))


def constituents(prefix: str, packed: Mapping[str, Sequence[str]], stored: Iterable[str] | Mapping) -> list[str]:
    """The checkpoint's matrices that a layer of vLLM holds behind each other on its output axis.

    The layer's own name where the checkpoint has it, else what vLLM says it packs; empty when neither is stored.
    """
    if prefix in stored:
        return [prefix]
    parent, dot, last = prefix.rpartition(".")
    names = [f"{parent}{dot}{part}" for part in packed.get(last, ())]
    found = [name for name in names if name in stored]
    if found and len(found) != len(names):
        missing = ", ".join(name for name in names if name not in stored)
        raise ValueError(f"the checkpoint has {', '.join(found)} but not {missing}")
    return found


@dataclass(frozen=True)
class Section:
    """Output channels that belong together: one of q, k, v, gate, up."""

    width: int  # over all ranks, as the model sees it
    first: int  # of this rank
    local: int


@dataclass(frozen=True)
class Part:
    """What a rank runs of one stored matrix: whole blocks that cover what it owns, and where in them that lies.

    An EXL3 matrix can be cut between blocks only. Where vLLM cuts inside one, the whole block is run, with zeros for
    the input channels of others, and output channels of others dropped: the same numbers, some of them for nothing.
    """

    name: str
    first_in: int
    in_channels: int
    first_out: int
    out_channels: int
    pad_left: int  # zeros to put before the rank's x
    pad_right: int
    skip: int  # output channels to drop before the rank's own
    local: int  # the rank's own, as many as are stored


def cover(first: int, count: int, stored: int) -> tuple[int, int]:
    """The blocks that hold [first, first + count): (first, count). None for an empty range."""
    if count == 0:
        return 0, 0
    begin = first // BLOCK * BLOCK
    end = min(-(-(first + count) // BLOCK) * BLOCK, stored)
    return begin, end - begin


def check_width(what: str, stored: int, model: int) -> None:
    """A stored axis is as long as the model's, or that rounded up to whole blocks."""
    rounded = -(-model // BLOCK) * BLOCK
    if stored not in (model, rounded):
        legal = f"{model}" if rounded == model else f"{model} or {rounded}"
        raise ValueError(f"{what} has {stored} channels, the model {model}; legal is {legal}")


def cut_part(
    name: str, stored_in: int, stored_out: int, first_in: int, local_in: int, first_out: int, local_out: int
) -> Part:
    """The part of a stored matrix that serves input and output channels of one rank."""
    if first_in + local_in > stored_in or first_out + local_out > stored_out:
        raise ValueError(
            f"{name} is {stored_in} x {stored_out}, too small for input channels {first_in} to {first_in + local_in} "
            f"and output channels {first_out} to {first_out + local_out}"
        )
    begin_in, count_in = cover(first_in, local_in, stored_in)
    begin_out, count_out = cover(first_out, local_out, stored_out)
    return Part(
        name=name,
        first_in=begin_in,
        in_channels=count_in,
        first_out=begin_out,
        out_channels=count_out,
        pad_left=first_in - begin_in,
        pad_right=count_in - local_in - (first_in - begin_in),
        skip=first_out - begin_out,
        local=local_out,
    )


def assign(
    names: Sequence[str], widths: Mapping[str, int], sections: Sequence[Section]
) -> list[tuple[str, int, Section]]:
    """Which matrix, and from which of its output channels on, holds each section.

    ``widths``: stored output channels by name. As many matrices as sections go one to one; otherwise each matrix
    holds consecutive sections that fill it.
    """
    if len(names) == len(sections):
        for name, section in zip(names, sections):
            check_width(name, widths[name], section.width)
        return [(name, 0, section) for name, section in zip(names, sections)]
    placed: list[tuple[str, int, Section]] = []
    rest = list(sections)
    for name in names:
        begin = 0
        while rest and begin + rest[0].width <= widths[name]:
            placed.append((name, begin, rest[0]))
            begin += rest.pop(0).width
        if begin == 0:
            break
        check_width(name, widths[name], begin)
    if rest or {name for name, _, _ in placed} != set(names):
        stored = ", ".join(f"{name} {widths[name]}" for name in names)
        raise ValueError(
            f"the model's output sections {', '.join(str(s.width) for s in sections)} do not fit the stored matrices "
            f"({stored})"
        )
    return placed


def merge(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring parts of one matrix as one, where that takes no channel more."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.name == part.name
            and (last.first_in, last.in_channels, last.pad_left) == (part.first_in, part.in_channels, part.pad_left)
            and last.first_out + last.skip + last.local == part.first_out + part.skip
        ):
            end = max(last.first_out + last.out_channels, part.first_out + part.out_channels)
            merged[-1] = Part(
                name=part.name,
                first_in=part.first_in,
                in_channels=part.in_channels,
                first_out=last.first_out,
                out_channels=end - last.first_out,
                pad_left=part.pad_left,
                pad_right=part.pad_right,
                skip=last.skip,
                local=last.local + part.local,
            )
        else:
            merged.append(part)
    return merged
