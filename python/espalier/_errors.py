# SPDX-License-Identifier: Apache-2.0
"""The exceptions: one for each category of the library, with the library's sentence as their text."""


class EspalierError(Exception):
    """What the library refuses. str() is the library's sentence, `category` its kind."""

    category: str = ""


class UsageError(EspalierError, ValueError):
    """The caller asked for something that has no meaning: an unknown layer, a wrong dtype, a closed handle."""

    category = "usage"


class IoError(EspalierError, OSError):
    """A path is missing, not a regular file, or could not be read."""

    category = "io"


class FormatError(EspalierError, ValueError):
    """The bytes of a file break a rule of their format."""

    category = "format"


class UnsupportedError(EspalierError, NotImplementedError):
    """Well-formed, but a feature that this build does not have."""

    category = "unsupported"


class GeometryError(EspalierError, ValueError):
    """Sizes that do not fit each other."""

    category = "geometry"


class CapacityError(EspalierError, MemoryError):
    """More than a plan, a buffer or the machine's memory holds."""

    category = "capacity"


class DeviceError(EspalierError, RuntimeError):
    """A device is absent, another than expected, or failed."""

    category = "device"


class CancelledError(EspalierError, RuntimeError):
    """The caller stopped it: a progress function returned False."""

    category = "cancelled"
