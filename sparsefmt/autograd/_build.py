"""A graph's rows and columns straight from edges: on torch's stream, in torch's memory, no wait.

Few edges take one launch, see ``ops/engine/build_small.cu``; more of them launches of our own
around a stable sort and a scan of torch's, see ``build.cu`` there.  The host knows how many edges
and vertices there are, and nothing else: the cut of the rows is laid out for the most that it can
need, and known exactly once the ``Report`` is done.
"""

from functools import partial

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
from ._memory import DTYPES
from ._reports import Report


class Arrays:
    """The arrays of a CSR that a stream builds, and what is made of them once they are asked for.

    ``perm`` tells of each entry the number of its edge.
    """

    def __init__(self, at: Layout, memory: Tensor, report: Report) -> None:
        self.at, self.memory, self.report = at, memory, report
        self.structure = build.structure_in(at, memory.data_ptr(), report)
        self._built = Built()

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``indptr``, ``indices`` and ``perm``, which launches do not ask for."""
        return self._built.ask("views", self._views)

    def _views(self) -> tuple[Tensor, Tensor, Tensor]:
        at, count = self.at, self.memory.shape[0]
        first, item = at.indptr // ITEMSIZE[at.index_dtype], at.n_rows + 1
        sizes = [first, item, at.nnz, at.nnz, count - first - item - 2 * at.nnz]
        _, indptr, indices, perm, _ = self.memory.split_with_sizes(sizes)
        return indptr, indices, perm

    def settled(self) -> Structure:
        """Return the structure as it is, waiting for its build."""
        return self._built.ask("structure", lambda: exact(self.structure))

    def is_small(self) -> bool:
        """Tell whether it is built in one launch."""
        return build.is_small(self.at)

    def is_settled(self) -> bool:
        """Tell whether somebody has asked for the structure as it is."""
        return "structure" in self._built.found

    def without_cuts(self) -> Structure:
        """Return the structure for as many blocks as there can be, which another graph's may be.

        Its rows are cut between blocks only if the report says so, where the build is done.
        """
        found = self.report.found
        if found is not None and not found.cuts and self.structure.n_cuts:
            begin, at = self.memory.data_ptr(), self.at
            self.structure = build.structure_in(at, begin, self.report, cuts=False)
        return self.structure

    def plan(self) -> list[Tensor]:
        """Return the arrays of ``CSR.chunks``, waiting for the build."""
        return self._built.ask("plan", self._plan)

    def _plan(self) -> list[Tensor]:
        at, S, index = self.at, self.settled(), self.memory.dtype
        start = self._part(at.start, 2 * (S.blocks * CHUNKS_PER_BLOCK + 1), index).view(-1, 2)
        slot = self._part(at.slot, S.blocks + 1, torch.int32)
        cut = self._part(at.cut, S.n_cuts, torch.int32)
        return [start, slot, cut, self._part(at.long, S.n_long, index)]

    def inverse_degree(self) -> Tensor:
        """Return one over the number of entries of each row, 1 for an empty one, in float32."""
        make = partial(self._part, self.at.inverse, self.at.n_rows, torch.float32)
        return self._built.ask("inverse degree", make)

    def in_order(self) -> bool:
        """Tell whether each entry is at the place of its edge, waiting for the build."""
        return not self.report.wait().moved

    def csr(self) -> CSR:
        """Return the CSR over the arrays, without values, waiting for the build."""
        return self._built.ask("csr", self._csr)

    def _csr(self) -> CSR:
        start, slot, cut, long = (from_tensor("chunks", part) for part in self.plan())
        indptr, indices = (from_tensor("rows", view) for view in self.views()[:2])
        shape, S = (self.at.n_rows, self.at.n_cols), self.settled()
        csr = CSR._trusted(indptr=indptr, indices=indices, data=None, shape=shape)
        chunks = Chunks(start=start, slot=slot, cut=cut, long=long, longest=S.longest)
        csr._built().ask("chunks", lambda: chunks)
        csr._built().ask("structure", lambda: S)
        return csr

    def _part(self, begin: int, count: int, dtype: torch.dtype) -> Tensor:
        first = begin // dtype.itemsize
        return self.memory.view(dtype)[first : first + count]


def sides_of(edges: Edges, *, both: bool) -> tuple[Arrays, Arrays | None]:
    """Build the rows of the matrix of these edges, and if ``both`` its columns.

    Sources are columns, targets rows.
    """
    device, (n_rows, n_cols) = edges.device_number, edges.shape
    at = build.layout(n_rows, n_cols, edges.nnz, edges.index_dtype.name, device)
    source = edges.index.data_ptr()
    target = source + edges.nnz * ITEMSIZE[at.index_dtype]
    report = Report(device, edges.fault_maker())
    if build.is_small(at):
        return _small(at, report, edges.index, (target, source), both)
    rows = _built(at, report, edges.index, (target, source), source, transposed=False)
    return rows, columns_of(rows) if both else None


def _small(
    at: Layout, report: Report, like: Tensor, ids: tuple[int, int], both: bool
) -> tuple[Arrays, Arrays | None]:
    """Build few edges in one launch."""
    device, dtype = report.device, DTYPES[at.index_dtype]
    scratch = like.new_empty(build.small_scratch(at), dtype=torch.uint8)
    if not both:
        memory = like.new_empty(at.size // dtype.itemsize)
        half = build.Half(at, memory.data_ptr(), report.address)
        build.small((half, None), ids, scratch.data_ptr(), report.stream)
        return Arrays(at, memory, report), None
    of_columns = build.layout(at.n_cols, at.n_rows, at.nnz, at.index_dtype, device)
    other = Report(device)
    sizes = [at.size // dtype.itemsize, of_columns.size // dtype.itemsize]
    own, rest = like.new_empty(sum(sizes)).split_with_sizes(sizes)
    begin = own.data_ptr()
    halves = (
        build.Half(at, begin, report.address),
        build.Half(of_columns, begin + at.size, other.address),
    )
    build.small(halves, ids, scratch.data_ptr(), report.stream)
    return Arrays(at, own, report), Arrays(of_columns, rest, other)


def columns_of(rows: Arrays) -> Arrays:
    """Build the rows of the transpose; its ``perm`` numbers the entries of ``rows``."""
    own, device = rows.at, rows.report.device
    at = build.layout(own.n_cols, own.n_rows, own.nnz, own.index_dtype, device)
    ids = rows.structure.indices, 0
    minor = rows.structure.indptr
    return _built(at, Report(device), rows.memory, ids, minor, transposed=True)


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
    return Arrays(at, memory, report)
