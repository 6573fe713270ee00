"""A graph's rows and columns straight from edges: on torch's stream, in torch's memory, no wait.

Few edges take one launch, see ``ops/engine/build_small.cu``; more of them launches of our own
around a stable sort and a scan of torch's, see ``build.cu`` there.  The host knows how many edges
and vertices there are, and nothing else: the cut of the rows is laid out for the most that it can
need, and known exactly once the ``Report`` is done.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats.built import Built
from ..formats.chunks import CHUNKS_PER_BLOCK, Chunks
from ..formats.compressed import CSR
from ..interop.edges import Edges
from ..interop.torch import from_tensor
from ..ops.engine import build
from ..ops.engine.build import Layout
from ..ops.engine.launch import ITEMSIZE
from ..ops.engine.structure import Structure, exact
from ._memory import DTYPES, NAMES
from ._reports import Report, steps_beside


class Arrays:
    """The arrays of a CSR that a stream builds, and what is made of them once they are asked for.

    ``memory`` is that of the stream, in which they begin at byte ``start``.  ``perm`` tells of each
    entry the number of its edge.
    """

    def __init__(
        self, at: Layout, memory: Tensor, begin: int, report: Report, start: int = 0
    ) -> None:
        self.at, self.memory, self.report, self.start = at, memory, report, start
        self._begin = begin  # the address
        self.structure = build.structure_in(at, begin, report)
        self.built = Built()

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``indptr``, ``indices`` and ``perm``, which launches do not ask for."""
        return self.built.ask("views", self._views)

    def _views(self) -> tuple[Tensor, Tensor, Tensor]:
        at = self.at
        indptr, indices, perm = self._parts(
            at.indptr, self.memory.dtype, at.n_rows + 1, at.nnz, at.nnz
        )
        return indptr, indices, perm

    def settled(self) -> Structure:
        """Return the structure as it is, waiting for its build."""
        return self.built.ask("structure", lambda: exact(self.structure))

    def is_small(self) -> bool:
        """Tell whether it is built in one launch."""
        return build.is_small(self.at.n_rows, self.at.n_cols, self.at.nnz)

    def is_settled(self) -> bool:
        """Tell whether somebody has asked for the structure as it is."""
        return "structure" in self.built.found

    def without_cuts(self) -> Structure:
        """Return the structure for as many blocks as there can be, which another graph's may be.

        Its rows are cut between blocks only if the report says so, where the build is done.
        """
        found = self.report.found
        if found is not None and not found.cuts and self.structure.n_cuts:
            self.structure = build.structure_in(self.at, self._begin, self.report, cuts=False)
        return self.structure

    def plan(self) -> list[Tensor]:
        """Return the arrays of ``CSR.chunks``, waiting for the build."""
        return self.built.ask("plan", self._plan)

    def _plan(self) -> list[Tensor]:
        at, S, index = self.at, self.settled(), self.memory.dtype
        (start,) = self._parts(at.start, index, 2 * (S.blocks * CHUNKS_PER_BLOCK + 1))
        (slot,) = self._parts(at.slot, torch.int32, S.blocks + 1)
        (cut,) = self._parts(at.cut, torch.int32, S.n_cuts)
        (long,) = self._parts(at.long, index, S.n_long)
        return [start.view(-1, 2), slot, cut, long]

    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what rows are scaled by, where entries count 1 each: (n_rows,) in float32.

        One over their number, 1 for an empty row; and GCN's factors, see ``unit_scales``.
        """
        return self.built.ask("factors", self._factors)

    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        n = self.at.n_rows
        inverse, scale, square = self._parts(self.at.inverse, torch.float32, n, n, n)
        return inverse, scale, square

    def in_order(self) -> bool:
        """Tell whether each entry is at the place of its edge, waiting for the build."""
        return not self.report.wait().moved

    def csr(self) -> CSR:
        """Return the CSR over the arrays, without values, waiting for the build."""
        return self.built.ask("csr", self._csr)

    def _csr(self) -> CSR:
        start, slot, cut, long = (from_tensor("chunks", part) for part in self.plan())
        indptr, indices = (from_tensor("rows", view) for view in self.views()[:2])
        shape, S = (self.at.n_rows, self.at.n_cols), self.settled()
        csr = CSR._trusted(indptr=indptr, indices=indices, data=None, shape=shape)
        chunks = Chunks(start=start, slot=slot, cut=cut, long=long, longest=S.longest)
        csr._built().ask("chunks", lambda: chunks)
        csr._built().ask("structure", lambda: S)
        return csr

    def _parts(self, begin: int, dtype: torch.dtype, *sizes: int) -> Sequence[Tensor]:
        """Return views of memory that begin there, one behind the other."""
        memory = self.memory if self.memory.dtype is dtype else self.memory.view(dtype)
        first = (self.start + begin) // dtype.itemsize
        left = memory.shape[0] - first - sum(sizes)
        return memory.split_with_sizes([first, *sizes, left])[1:-1]


def sides_of(edges: Edges, *, both: bool) -> tuple[Arrays, Arrays | None]:
    """Build the rows of the matrix of these edges, and if ``both`` its columns.

    Sources are columns, targets rows.
    """
    device, (n_rows, n_cols), nnz = edges.device_number, edges.shape, edges.nnz
    index, dtype = edges.index, NAMES[edges.index.dtype]
    source = index.data_ptr()
    target = source + nnz * ITEMSIZE[dtype]
    report = Report(device, edges.fault_maker())
    rows = columns = None
    try:
        if build.is_small(n_rows, n_cols, nnz):
            how = build.small(n_rows, n_cols, nnz, dtype, device, both=both)
            rows, columns = _small(how, report, index, (target, source))
            return rows, columns
        at = build.layout(n_rows, n_cols, nnz, dtype, device)
        rows = _built(at, report, index, (target, source), source, transposed=False)
    finally:
        if rows is None:
            report.abandon()
    return rows, columns_of(rows) if both else None


def _small(
    how: build.Small, report: Report, like: Tensor, ids: tuple[int, int]
) -> tuple[Arrays, Arrays | None]:
    """Build few edges in one launch."""
    device, stream = report.device, report.stream
    memory = like.new_empty(how.size // like.element_size())
    scratch = like.new_empty(how.scratch // ITEMSIZE["int32"], dtype=torch.int32)
    begin, rows, columns = memory.data_ptr(), how.rows, how.columns
    other = None if columns is None else Report(device, stream=stream)
    reports, found = (report.address, 0 if other is None else other.address), None
    try:
        how(ids, begin, reports, scratch.data_ptr(), steps_beside(report), stream)
        found = Arrays(rows, memory, begin, report)
    finally:
        if found is None and other is not None:
            other.abandon()
    if columns is None or other is None:
        return found, None
    return found, Arrays(columns, memory, begin + rows.size, other, rows.size)


def columns_of(rows: Arrays) -> Arrays:
    """Build the rows of the transpose; its ``perm`` numbers the entries of ``rows``."""
    own, device = rows.at, rows.report.device
    at = build.layout(own.n_cols, own.n_rows, own.nnz, own.index_dtype, device)
    ids = rows.structure.indices, 0
    minor, report, found = rows.structure.indptr, Report(device), None
    try:
        found = _built(at, report, rows.memory, ids, minor, transposed=True)
    finally:
        if found is None:
            report.abandon()
    return found


def _built(
    at: Layout, report: Report, like: Tensor, ids: tuple[int, int], minor: int, *, transposed: bool
) -> Arrays:
    """Launch the build; ``ids`` and ``minor`` are addresses, as ``build`` takes them."""
    dtype, key_dtype = DTYPES[at.index_dtype], DTYPES[at.key_dtype]
    memory = like.new_empty(at.size // dtype.itemsize, dtype=dtype)
    keys = like.new_empty(at.nnz, dtype=key_dtype)
    begin, address, stream = memory.data_ptr(), report.address, report.stream
    build.keys(at, begin, ids, keys.data_ptr(), address, stream)
    keys, order = torch.sort(keys, stable=True)
    words = order.new_empty(at.n_rows + 1)
    places = keys.data_ptr(), order.data_ptr(), minor, words.data_ptr()
    build.rows(at, begin, *places, stream, transposed=transposed)
    words.cumsum_(0)
    build.chunks(at, begin, words.data_ptr(), address, stream)
    return Arrays(at, memory, begin, report)
