"""The exceptions that sparsefmt raises on purpose.

Each also derives from the built-in that fits, so ``except ValueError`` keeps working in code that
has never heard of sparsefmt.  The text of an error names the argument, the value that it got, what
was expected and how to mend it.
"""


class SparseFmtError(Exception):
    """The root: ``except sparsefmt.SparseFmtError`` catches all that this package raises itself."""


class FormatError(SparseFmtError, ValueError):
    """A format's arrays contradict each other: decreasing ``indptr``, unsorted CBSR columns, ..."""


class ShapeError(SparseFmtError, ValueError):
    """An array has the wrong number of dimensions or the wrong length, or shapes do not fit."""


class DtypeError(SparseFmtError, TypeError):
    """An array has a dtype that its role does not allow, or that no kernel supports."""


class IndexRangeError(SparseFmtError, IndexError):
    """An index lies outside the shape, or a size lies beyond what the index dtype can count."""


class DeviceError(SparseFmtError, RuntimeError):
    """Arrays that belong together live on different devices, or the device is not there."""


class UnsupportedError(SparseFmtError, NotImplementedError):
    """The request makes sense but is not offered here; the text names what to use instead."""


class FileFormatError(SparseFmtError, ValueError):
    """A file is not what its name or header says: malformed, truncated, lying or too large."""


class OutOfMemoryError(SparseFmtError, MemoryError):
    """An allocation failed.  Nothing was changed; the process can go on with smaller work."""


class KernelLaunchError(SparseFmtError, RuntimeError):
    """A CUDA kernel did not compile, did not start, or failed while it ran."""


class RankError(SparseFmtError, RuntimeError):
    """A process of a group is gone, or differs from the others; the text names its rank."""
