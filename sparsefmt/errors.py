"""The exceptions that sparsefmt raises on purpose.

Each also derives from the built-in that fits, so ``except ValueError`` keeps working in code that
has never heard of sparsefmt.  The text of an error names the argument, the value that it got, what
was expected and how to mend it.
"""


class SparseFmtError(Exception):
    """The root of all exceptions that this package raises itself."""


class FormatError(SparseFmtError, ValueError):
    """A contradiction between arrays of a format: decreasing ``indptr``, unsorted columns, ..."""


class ShapeError(SparseFmtError, ValueError):
    """A wrong number of dimensions or a wrong length of an array, or shapes that do not fit."""


class DtypeError(SparseFmtError, TypeError):
    """A dtype that an array's role does not allow, or that no kernel supports."""


class IndexRangeError(SparseFmtError, IndexError):
    """An index outside the shape, or a size beyond what the index dtype can count."""


class DeviceError(SparseFmtError, RuntimeError):
    """Arrays that belong together on different devices, or a device that is not there."""


class UnsupportedError(SparseFmtError, NotImplementedError):
    """A request that makes sense but is not offered here; the text names what to use instead."""


class FileFormatError(SparseFmtError, ValueError):
    """A file that is not what its name or header says: malformed, truncated, lying or too large."""


class OutOfMemoryError(SparseFmtError, MemoryError):
    """A failed allocation.  Nothing was changed; the process can go on with smaller work."""


class KernelLaunchError(SparseFmtError, RuntimeError):
    """A CUDA kernel that did not compile, did not start, or failed while it ran."""


class RankError(SparseFmtError, RuntimeError):
    """A process of a group that is gone, or differs from the others; the text names its rank."""
