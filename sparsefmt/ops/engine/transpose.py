"""The transpose of a matrix's structure, made once for the gradients of many products."""

from operator import is_not
from typing import Any, Never

from ...errors import DtypeError, FormatError
from ...formats import primitives
from ...formats.arrays import Array, allocating, namespace, on_device_of
from ...formats.base import Format
from ...formats.compressed import CSR
from .bind import sparse
from .structure import transposed


class Transpose:
    """The transpose of a matrix's structure, and the numbers of its entries.

    ``ops.transpose(A)`` makes it, nobody else: kernels trust what it says.

    Attributes
    ----------
    csr : CSR, shape (n_cols, n_rows)
        Without values.
    perm : array, shape (nnz,)
        The number that each entry of ``csr`` has in ``A.tocsr()``, of the dtype of its indices.
    inverse : array, shape (nnz,)
        Where each entry of ``A.tocsr()`` is in ``csr``.
    """

    __slots__ = ("_of", "csr", "inverse", "perm")

    csr: CSR
    perm: Array
    inverse: Array
    _of: Format

    def __init__(self, *_: Any, **__: Any) -> None:
        raise DtypeError("a Transpose is made by the library alone: call ops.transpose(A).")

    def __setattr__(self, name: str, _: object) -> Never:
        raise AttributeError(f"{name} of a Transpose is read-only.")

    def __reduce__(self) -> tuple[Any, ...]:
        return transpose, (self._of,)  # of the same indices as a matrix that is pickled beside it

    def __repr__(self) -> str:
        return f"<Transpose of a matrix of shape {self.csr.shape[::-1]}, {self.csr.nnz} entries>"


def transpose(A: Format) -> Transpose:
    """Transpose the structure of a matrix, for gradients that are computed more than once.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
        Its values are not read.

    Returns
    -------
    Transpose
        What ``aggregate_backward``, ``spmm_arg_backward`` and ``sspmm`` take as ``transposed``,
        with ``A`` and with all that shares its indices, such as ``A.with_data(values)``.

    Raises
    ------
    DtypeError
        If ``A`` is no sparse format.

    Notes
    -----
    Deterministic.  A sort, and then an indptr and three indices an entry of memory.
    """
    A = sparse(A)
    of = A if A.format == "cbsr" else A.with_data(None)
    csr, perm = transposed(of.tocsr())
    with on_device_of(perm), allocating(f"a permutation of {len(perm)} entries"):
        parts = {"csr": csr, "perm": perm, "inverse": primitives.inverse(perm)}
    found = object.__new__(Transpose)
    for name, part in (parts | {"_of": of}).items():
        object.__setattr__(found, name, part)
    return found


def transpose_of(A: Format, csr: CSR, given: object) -> tuple[CSR, Array, Array | None]:
    """Return transpose, perm and None, or those ``given`` with perm's inverse, checked by ``A``."""
    if given is None:
        return *transposed(csr), None
    if not isinstance(given, Transpose):
        raise DtypeError(
            f"transposed is a {type(given).__name__}: give what ops.transpose(A) returned, or "
            "leave it out."
        )
    (kind, shape, *arrays), (kind_, shape_, *others) = _structure(A), _structure(given._of)
    if (kind, shape) != (kind_, shape_) or any(map(is_not, arrays, others)):
        raise FormatError(
            f"transposed was made of another matrix than A, {A!r}: give ops.transpose(A), of this "
            "A or of one that shares its indices."
        )
    return given.csr, given.perm, given.inverse


def _structure(A: Format) -> tuple[Any, ...]:
    """Return what makes a structure: its format, its shape, and the arrays of its indices."""
    return type(A), A.shape, *(array for name, array in A._arrays().items() if name != "data")


# Values of entries between the order of a matrix's own data and that of its CSR


def in_csr_order(values: Any, perm: Array | None) -> Any:
    """Move values, or rows of them, from the matrix's order to that of its CSR."""
    if values is None or perm is None:
        return values
    with on_device_of(perm), allocating(f"{values.nbytes} bytes of values in CSR order"):
        return values[perm]


def in_own_order(values: Any, perm: Array | None, out: Array | None = None) -> Any:
    """Write values of the CSR's entries in the matrix's order, to ``out`` or new memory."""
    if perm is None:
        return values
    with on_device_of(perm), allocating(f"{values.nbytes} bytes of values"):
        out = namespace(perm).empty_like(values) if out is None else out
        out[perm] = values
    return out
