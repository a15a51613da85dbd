# SPDX-License-Identifier: Apache-2.0
"""Array -> numpy, for __array__."""

from typing import Any

_ITEM_BITS = {"bfloat16": 16}


def to_numpy(array: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """A view of the memory where numpy has the type; with ml_dtypes also for bfloat16 and the eight-bit floats."""
    import numpy

    name = array.dtype
    try:
        kind = numpy.dtype(name)
    except TypeError:
        kind = _extension_dtype(name)
    plain = array if kind.kind in "biufc" else array.view(f"uint{_ITEM_BITS.get(name, 8)}")
    found = numpy.asarray(memoryview(plain)).view(kind)
    if dtype is None or numpy.dtype(dtype) == kind:
        return found.copy() if copy else found
    if copy is False:
        raise ValueError(f"an array of {name} as {numpy.dtype(dtype)} is a copy, and copy=False forbids one")
    return found.astype(dtype)


def _extension_dtype(name: str) -> Any:
    import numpy

    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"numpy has no {name}; install ml_dtypes, or take torch.from_dlpack(array) or "
            f"array.view('uint{_ITEM_BITS.get(name, 8)}')"
        ) from None
    return numpy.dtype(getattr(ml_dtypes, name))
