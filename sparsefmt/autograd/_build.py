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
from ._memory import DTYPES, NAMES, out_of_inference
from ._reports import Report, progress_of


class Arrays:
    """The arrays of a CSR that a stream builds, and what is made of them once they are asked for.

    They begin at byte ``offset`` of ``memory``, which is the stream's.  ``perm`` tells of each
    entry the number of its edge.
    """

    def __init__(self, at: Layout, memory: Tensor, report: Report, offset: int = 0) -> None:
        self.at, self.memory, self.report, self._offset = at, memory, report, offset
        self._begin = memory.data_ptr() + offset
        self.structure = build.structure_in(at, self._begin, report)
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

    def inverse_degree(self) -> Tensor:
        """Return one over the number of entries of each row, 1 for an empty one: in float32."""
        at = self.at
        return self.built.ask(
            "inverse degree", lambda: self._parts(at.inverse, torch.float32, at.n_rows)[0]
        )

    def unit_scales(self) -> tuple[Tensor, Tensor]:
        """Return GCN's factors of the rows, see ``autograd.unit_scales``: in float32."""
        return self.built.ask("unit scales", self._unit_scales)

    def _unit_scales(self) -> tuple[Tensor, Tensor]:
        n = self.at.n_rows
        scale, square = self._parts(self.at.scale, torch.float32, n, n)
        return scale, square

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
        with out_of_inference():
            memory = self.memory if self.memory.dtype is dtype else self.memory.view(dtype)
            first = (self._offset + begin) // dtype.itemsize
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
    with Report(device, edges.fault_maker()) as report:
        if build.is_small(n_rows, n_cols, nnz):
            how = build.small(n_rows, n_cols, nnz, dtype, device, both=both)
            return _small(how, report, index, (target, source))
        at = build.layout(n_rows, n_cols, nnz, dtype, device)
        rows = _built(at, report, index, (target, source), source, transposed=False)
    return rows, columns_of(rows) if both else None


def _small(
    how: build.Small, report: Report, like: Tensor, ids: tuple[int, int]
) -> tuple[Arrays, Arrays | None]:
    """Build few edges in one launch."""
    memory = like.new_empty(how.size // like.element_size())
    scratch = like.new_empty(how.scratch // ITEMSIZE["int32"], dtype=torch.int32)
    begin, room, stream = memory.data_ptr(), scratch.data_ptr(), report.stream
    progress = progress_of(report)
    if how.columns is None:
        how(ids, begin, (report.address, 0), room, progress, stream)
        return Arrays(how.rows, memory, report), None
    with Report(report.device, stream=stream) as other:
        how(ids, begin, (report.address, other.address), room, progress, stream)
        rows = Arrays(how.rows, memory, report)
        return rows, Arrays(how.columns, memory, other, how.rows.size)


def columns_of(rows: Arrays) -> Arrays:
    """Build the rows of the transpose; its ``perm`` numbers the entries of ``rows``."""
    own, device = rows.at, rows.report.device
    sizes = own.n_cols, own.n_rows, own.nnz, own.index_dtype, device
    at = build.layout(*sizes, transposed=True)
    ids = rows.structure.indices, 0
    with Report(device) as report:
        return _built(at, report, rows.memory, ids, rows.structure.indptr, transposed=True)


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
