"""Orders of vertices that raise locality: by degree, by reverse Cuthill-McKee, by community."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from . import _random
from .errors import FormatError, ShapeError, UnsupportedError
from .formats import checks, primitives
from .formats.arrays import (
    Array,
    allocating,
    as_array,
    device_of,
    namespace,
    on_device_of,
    to_device,
)
from .formats.base import Format
from .formats.cbsr import CBSR
from .formats.compressed import COO, CSR
from .formats.sgt import SGT

Axis = Literal["both", "rows", "columns"]

#: A vertex, a label and at least 12 bits of a score share one 64-bit word.
_MOST_VERTICES = 1 << 26


@dataclass(frozen=True, eq=False)
class Order:
    """A permutation of vertices: position ``p`` holds the old vertex ``perm[p]``.

    Parameters
    ----------
    perm : array, shape (n,)
        int32 or int64, every integer of 0 .. n - 1 once.

    Raises
    ------
    FormatError, IndexRangeError, ShapeError, DtypeError
        If ``perm`` is no permutation.
    """

    perm: Array  #: (n,) old vertex at each new position
    inverse: Array = field(init=False)  #: (n,) new position of each old vertex

    def __post_init__(self) -> None:
        perm = as_array("perm", self.perm)
        checks.indices(perm=perm)
        checks.in_range("perm", perm, len(perm), "vertices")
        with on_device_of(perm), allocating(f"inverse of {len(perm)} places"):
            xp = namespace(perm)
            inverse = xp.full(len(perm), -1, perm.dtype)
            inverse[perm] = xp.arange(len(perm), dtype=perm.dtype)
            missing = xp.flatnonzero(inverse < 0)[:1].tolist()  # synchronize!
        if missing:
            raise FormatError(
                f"perm never names vertex {missing[0]}: a permutation names each vertex once."
            )
        object.__setattr__(self, "perm", perm)
        object.__setattr__(self, "inverse", inverse)

    def __len__(self) -> int:
        return len(self.perm)

    @property
    def device(self) -> str:
        """Return the device: ``"cpu"`` or ``"cuda:<ordinal>"``."""
        return device_of(self.perm)

    def to(self, device: str) -> "Order":
        """Move the order to another device; itself if there."""
        moved = to_device(self.perm, device)
        return self if moved is self.perm else Order(moved)

    def apply(self, A: Format, axis: Axis = "both") -> Any:
        """Return ``A`` with its vertices in this order, in the format of ``A``.

        ``B[p, q] = A[perm[p], perm[q]]``; with ``axis="rows"`` ``B[p, j] = A[perm[p], j]``, with
        ``"columns"`` ``B[i, q] = A[i, perm[q]]``.  The entries of a row keep their order (call
        ``sorted_indices()`` for ascending columns), those of a COO theirs.

        Parameters
        ----------
        A : COO, CSR, CSC or SGT
            Square for ``axis="both"``; as many rows (or columns) as there are vertices.
        axis : "both", "rows" or "columns"

        Raises
        ------
        ShapeError
            If the order does not fit the shape.
        DeviceError
            If ``A`` is on another device.
        UnsupportedError
            If ``A`` is a CBSR (use ``apply_features``) or no format, or ``axis`` is unknown.
        """
        return self.apply_with_perm(A, axis)[0]

    def apply_with_perm(self, A: Format, axis: Axis = "both") -> tuple[Any, Array]:
        """Return ``(B, perm)``, where ``B.data == A.data[perm]``, see ``apply``."""
        self._check(A, axis)
        with on_device_of(self.perm), allocating(f"{axis} of {A!r} in another order"):
            if isinstance(A, COO):
                row = A.row if axis == "columns" else self._places(A.row)
                col = A.col if axis == "rows" else self._places(A.col)
                perm = namespace(A.row).arange(A.nnz, dtype=A.index_dtype)
                return A._replace(row=row, col=col), perm
            csr, there = A.tocsr_with_perm()
            moved, perm = self._apply_csr(csr, axis)
            options = {"tile": A.tile} if isinstance(A, SGT) else {}
            B, back = moved.asformat_with_perm(A.format, **options)
            return B, there[perm][back]

    def apply_features(self, X: Array) -> Array:
        """Return ``X[perm]``: feature rows in the new order, for ``X`` of shape (n, ...)."""
        return self._features(X, self.perm)

    def undo_features(self, X: Array) -> Array:
        """Return ``X[inverse]``: feature rows back in the old order."""
        return self._features(X, self.inverse)

    def _check(self, A: Format, axis: str) -> None:
        if axis not in ("both", "rows", "columns"):
            raise UnsupportedError(f'axis is {axis!r}: use "both", "rows" or "columns".')
        if not isinstance(A, Format) or isinstance(A, CBSR):
            raise UnsupportedError(
                f"A is a {type(A).__name__}: give a COO, CSR, CSC or SGT "
                "(features: apply_features)."
            )
        n = len(self)
        fits = {"rows": A.n_rows == n, "columns": A.n_cols == n, "both": A.shape == (n, n)}
        if not fits[axis]:
            hint = (
                ' (a rectangular matrix takes axis="rows" or "columns")' if axis == "both" else ""
            )
            raise ShapeError(f"A has shape {A.shape} but {axis} of {n} vertices are ordered{hint}.")
        checks.same_device("A", A._indices, "the order", self.perm)

    def _places(self, vertices: Array) -> Array:
        return self.inverse[vertices].astype(vertices.dtype, copy=False)

    def _apply_csr(self, A: CSR, axis: str) -> tuple[CSR, Array]:
        indptr = A.indptr
        if axis == "columns":
            perm = namespace(A.indptr).arange(A.nnz, dtype=A.index_dtype)
        else:
            indptr, perm = primitives.take_segments(A.indptr, self.perm)
        indices = A.indices[perm]
        data = None if A.data is None else A.data[perm]
        if axis != "rows":
            indices = self._places(indices)
        return A._replace(indptr=indptr, indices=indices, data=data), perm

    def _features(self, X: Array, places: Array) -> Array:
        X = as_array("X", X)
        if X.ndim < 1 or len(X) != len(self):
            raise ShapeError(
                f"X has shape {X.shape} but {len(self)} vertices are ordered: one row each."
            )
        checks.same_device("X", X, "the order", self.perm)
        with on_device_of(X), allocating(f"{X.nbytes} bytes in another order"):
            return X[places]

    def __repr__(self) -> str:
        return f"Order({len(self)} vertices, {self.perm.dtype}, {self.device})"


def degree_order(A: Format, *, descending: bool = True) -> Order:
    """Compute the order of rows by their number of stored entries, ties by row.

    Parameters
    ----------
    A : COO, CSR, CSC or SGT, shape (n_rows, n_cols)
        A rectangular matrix gives an order of its rows.
    descending : bool
        Hubs first.

    Returns
    -------
    Order
        Of the rows, on the device of ``A``.

    Raises
    ------
    UnsupportedError
        If ``A`` is a CBSR or no format.
    """
    csr = _as_csr(A)
    with on_device_of(csr.indptr), allocating(f"order of {csr.n_rows} rows"):
        keys = -csr.lengths if descending else csr.lengths
        return Order(namespace(keys).argsort(keys, kind="stable").astype(csr.index_dtype))


def rcm_order(A: Format) -> Order:
    """Compute the reverse Cuthill-McKee order of ``A + A.T``: small ``|i - j|``.

    Parameters
    ----------
    A : COO, CSR, CSC or SGT, shape (n, n)

    Returns
    -------
    Order
        Of the vertices, on the device of ``A``.

    Raises
    ------
    ShapeError
        If ``A`` is not square.
    UnsupportedError
        If ``A`` is a CBSR or no format.
    IndexRangeError
        If ``A`` goes beyond int32, which SciPy's algorithm uses.

    Notes
    -----
    A breadth-first search on the CPU (``scipy.sparse.csgraph.reverse_cuthill_mckee``); a graph on a
    GPU is copied over and the order back.  Cuthill and McKee, ACM '69.
    """
    import scipy.sparse.csgraph

    csr = _as_square(A)
    host = csr.with_data(None).astype(index_dtype=np.int32).to("cpu")
    ones = np.ones(host.nnz, bool)
    graph = scipy.sparse.csr_array((ones, host.indices, host.indptr), shape=host.shape)
    if host.n_rows == 0:
        perm = np.zeros(0, csr.index_dtype)
    else:
        perm = scipy.sparse.csgraph.reverse_cuthill_mckee(graph).astype(csr.index_dtype)
    return Order(to_device(perm, csr.device))


def community_order(A: Format, *, seed: int = 0, rounds: int = 24) -> Order:
    """Compute an order of vertices by community, then by vertex; communities by lowest vertex.

    Label propagation on ``A + A.T``: every vertex begins alone; in each round a random half of them
    takes the label ``l`` that maximises ``links(v, l) - deg(v) * deg(l) / (2 m)``, where ``links``
    counts entries between ``v`` and the vertices of ``l``, ``deg(l)`` adds up their degrees and
    ``2 m`` all degrees: each step raises the modularity, so that no community swallows the graph.

    Parameters
    ----------
    A : COO, CSR, CSC or SGT, shape (n, n)
        At most 2**26 vertices.  Values are ignored, duplicates count.
    seed : int
        The same seed gives the same order on every run.
    rounds : int
        At most so many; it ends earlier when two rounds change nothing.

    Returns
    -------
    Order
        Of the vertices, on the device of ``A``.

    Raises
    ------
    ShapeError
        If ``A`` is not square or ``rounds`` is negative.
    UnsupportedError
        If ``A`` is a CBSR or no format, has too many vertices, or ``seed`` is no seed.

    Notes
    -----
    Each round is one sort of the entries; about 64 bytes an entry.  Raghavan, Albert and Kumara,
    Phys. Rev. E 76 (2007) 036106; the modularity term is Barber and Clark's, Phys. Rev. E 80 (2009)
    026129.
    """
    csr = _as_square(A)
    seed, rounds = _random.check_seed(seed), checks.integer("rounds", rounds, least=0)
    if csr.n_rows > _MOST_VERTICES:
        raise UnsupportedError(
            f"A has {csr.n_rows} rows: community_order takes {_MOST_VERTICES} at most."
        )
    with on_device_of(csr.indptr), allocating(f"communities of {csr!r}"):
        xp = namespace(csr.indptr)
        row = primitives.expand(csr.indptr, csr.nnz)
        ends = xp.concatenate([row, csr.indices]), xp.concatenate([csr.indices, row])
        labels = _propagate(ends[0], ends[1], csr.n_rows, seed, rounds)
        vertices = xp.arange(csr.n_rows, dtype=np.int64)
        order = xp.argsort(labels, kind="stable")
        starts = xp.searchsorted(labels[order], vertices)  # of labels in use
        lowest = order[xp.minimum(starts, csr.n_rows - 1)][labels]
        return Order(xp.argsort(lowest, kind="stable").astype(csr.index_dtype))


def _propagate(row: Array, col: Array, n: int, seed: int, rounds: int) -> Array:
    """Compute the label of each vertex after at most ``rounds`` rounds: (n,)."""
    xp = namespace(row)
    vertices = xp.arange(n, dtype=np.int64)
    degrees = xp.bincount(row, minlength=n).astype(np.float64)  # synchronize!
    labels, quiet = vertices, 0
    for step in range(rounds if len(row) else 0):
        awake = _random.bits(vertices, seed, step) >> np.uint64(63) > 0
        chosen = awake[row]
        row_chosen, col_chosen = row[chosen], col[chosen]  # synchronize!
        moved = _relabelled(row_chosen, col_chosen, labels, degrees, seed + step)
        quiet = quiet + 1 if bool((moved == labels).all()) else 0  # synchronize!
        labels = moved
        if quiet == 2:
            break
    return labels


def _relabelled(row: Array, col: Array, labels: Array, degrees: Array, salt: int) -> Array:
    """Choose the best label of each vertex in ``row``; links go to ``col``."""
    xp = namespace(row)
    n = len(labels)
    bits = max(primitives.bits_for(n), 1)
    words = row.astype(np.uint64) << np.uint64(bits)
    words |= labels[col].astype(np.uint64)
    words.sort()
    new = xp.ones(len(words), bool)
    xp.not_equal(words[1:], words[:-1], out=new[1:])
    starts = xp.flatnonzero(new)  # synchronize!
    links = xp.diff(xp.append(starts, len(words)))
    words = words[starts]
    vertex = (words >> np.uint64(bits)).astype(np.int64)
    label = (words & np.uint64((1 << bits) - 1)).astype(np.int64)

    degree = degrees[vertex]
    label_degrees = xp.bincount(labels, weights=degrees, minlength=n)[label]  # synchronize!
    label_degrees -= xp.where(labels[vertex] == label, degree, 0.0)
    score = links / degree - label_degrees / degrees.sum()  # in [-1, 1]
    scale = float((1 << (63 - 2 * bits)) - 1)
    # One word again, (vertex, score, label): its sort puts the best label of a vertex last.  Labels
    # are scrambled, one to one, so that ties fall at random.
    odd, mask = 2 * _random.GOLDEN * salt + _random.GOLDEN, (1 << bits) - 1
    words &= np.uint64(~mask & _random.WORD)
    words <<= np.uint64(64 - 2 * bits)
    words |= ((score + 1.0) * scale).astype(np.uint64) << np.uint64(bits)
    words |= (label.astype(np.uint64) * np.uint64(odd & mask)) & np.uint64(mask)
    words.sort()
    last = xp.flatnonzero(xp.diff(xp.append(vertex, n)))  # synchronize!
    best = (words[last] & np.uint64(mask)) * np.uint64(pow(odd, -1, mask + 1)) & np.uint64(mask)
    result = labels.copy()
    result[vertex[last]] = best.astype(np.int64)
    return result


def _as_csr(A: Format) -> CSR:
    if not isinstance(A, Format) or isinstance(A, CBSR):
        raise UnsupportedError(f"A is a {type(A).__name__}: give a COO, CSR, CSC or SGT.")
    return A.tocsr()


def _as_square(A: Format) -> CSR:
    csr = _as_csr(A)
    if csr.n_rows != csr.n_cols:
        raise ShapeError(
            f"A has shape {csr.shape}: this order is of a square matrix (degree_order takes any)."
        )
    return csr
