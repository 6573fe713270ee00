"""A graph's rows and columns straight from edges: on torch's stream, in torch's memory, no wait.

Few edges take one launch, see ``ops/engine/build_small.cu``; more of them launches of our own
around a stable sort and a scan of torch's, see ``build.cu`` there.  The host knows how many edges
and vertices there are, and nothing else.  So it launches kernels for the most thread blocks that
the rows can need; the exact number, and others, come with the ``Report`` of the build.
"""

from functools import cached_property

import torch
from torch import Tensor

from ...formats.chunks import CHUNKS_PER_BLOCK, Chunks
from ...formats.compressed import CSR
from ...graph.edges import Edges
from ...interop.torch import from_tensor
from ...ops.engine import build
from ...ops.engine.build import Findings, Layout
from ...ops.engine.jit import ITEMSIZE
from ...ops.engine.structure import Sizes, Structure, exact
from ..engine.memory import DTYPES, NAMES, out_of_inference
from .reports import LINE, Report, progress_of

_ITEM = ITEMSIZE["float32"]


class BuiltArrays:
    """The arrays of a CSR that a stream builds from edges, and views of them, made at first use.

    They lie in ``memory`` from byte ``offset`` on, at the places of the layout ``at``, which may
    have room for more entries than there are.  ``memory`` is a float32 tensor of the stream: most
    steps ask for views of it as factors of rows, which are float32.  ``half`` picks the findings of
    these arrays from the report: 0 for rows, 1 for columns that one launch builds beside them.
    ``small`` says that one launch builds all.
    """

    def __init__(
        self,
        at: Layout,
        sizes: Sizes,
        memory: Tensor,
        report: Report,
        half: int = 0,
        offset: int = 0,
        *,
        small: bool = True,
    ) -> None:
        self.at, self.sizes, self.memory, self.small = at, sizes, memory, small
        self.report, self.half, self._offset = report, half, offset
        self._begin = memory.data_ptr() + offset
        self.structure = build.structure_in(at, self._begin, sizes, report, half)

    @property
    def findings(self) -> Findings | None:
        """Return the counts that the build has reported, None while it is not done."""
        halves = self.report.findings
        return None if halves is None else halves[self.half]

    @cached_property
    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``indptr``, ``indices`` and ``perm``; launches read addresses instead.

        ``perm[e]`` is the number of the edge that is entry e, or in columns the place of that entry
        among those of the rows.
        """
        at, (n_rows, _, nnz, index_dtype) = self.at, self.sizes
        index = DTYPES[index_dtype]
        places = (at.indptr, n_rows + 1), (at.indices, nnz), (at.perm, nnz)
        indptr, indices, perm = (self._part(place, index, count) for place, count in places)
        return indptr, indices, perm

    @cached_property
    def exact(self) -> Structure:
        """Return the structure with exact sizes, waiting for its build."""
        return exact(self.structure)

    def reported_structure(self) -> Structure:
        """Return the structure: exact if anybody has asked for that, else for the most blocks.

        Launches for the most blocks are prepared once for all graphs of about this size.  They add
        up parts of rows, unless the build has reported that no row is cut between blocks.
        """
        if "exact" in self.__dict__:
            return self.exact
        findings = self.findings
        if findings is not None and not findings.cuts and self.structure.n_cuts:
            places = self.at, self._begin, self.sizes, self.report, self.half
            self.structure = build.structure_in(*places, cuts=False)
        return self.structure

    @cached_property
    def plan(self) -> list[Tensor]:
        """Return the arrays of ``CSR.chunks``, with exact sizes, waiting for the build."""
        at, S, index = self.at, self.exact, DTYPES[self.sizes.index_dtype]
        start = self._part(at.start, index, 2 * (S.blocks * CHUNKS_PER_BLOCK + 1))
        slot = self._part(at.slot, torch.int32, S.blocks + 1)
        cut = self._part(at.cut, torch.int32, S.n_cuts)
        long = self._part(at.long, index, S.n_long)
        return [start.view(-1, 2), slot, cut, long]

    @cached_property
    def inverse_degree(self) -> Tensor:
        """Return one over the number of entries of each row, 1 for an empty one: in float32."""
        return self._part(self.at.inverse, torch.float32, self.sizes.n_rows)

    @cached_property
    def unit_scales(self) -> tuple[Tensor, Tensor]:
        """Return GCN's factors of the rows, see ``autograd.unit_scales``: in float32."""
        at, dtype, n = self.at, torch.float32, self.sizes.n_rows
        return self._part(at.scale, dtype, n), self._part(at.square, dtype, n)

    @cached_property
    def csr(self) -> CSR:
        """Return the CSR over the arrays, without values, waiting for the build."""
        start, slot, cut, long = (from_tensor("chunks", part) for part in self.plan)
        indptr, indices = (from_tensor("rows", view) for view in self.views[:2])
        shape, S = self.sizes[:2], self.exact
        csr = CSR._trusted(indptr=indptr, indices=indices, data=None, shape=shape)
        chunks = Chunks(start=start, slot=slot, cut=cut, long=long, longest=S.longest)
        csr._built().ask("chunks", lambda: chunks)
        csr._built().ask("structure", lambda: S)
        return csr

    def _part(self, begin: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return a view of ``count`` values that begin at byte ``begin``."""
        memory, place = self.memory, (self._offset + begin) // dtype.itemsize
        if dtype is torch.float32 and not torch.is_inference_mode_enabled():  # most of them
            return memory.narrow(0, place, count)
        with out_of_inference():
            return memory.view(dtype).narrow(0, place, count)


def sides_of(edges: Edges, *, both: bool) -> tuple[BuiltArrays, BuiltArrays | None]:
    """Build the rows of the matrix of these edges, and if ``both`` its columns.

    Sources are columns, targets rows.
    """
    (n_rows, n_cols), nnz, index = edges.shape, edges.nnz, edges.index
    dtype, source = NAMES[index.dtype], index.data_ptr()
    sizes, target = Sizes(n_rows, n_cols, nnz, dtype), source + nnz * ITEMSIZE[dtype]
    small = build.is_small(n_rows, n_cols, nnz)
    with Report(edges.device_number, edges.fault_maker(), both=both and small) as report:
        if small:
            room = build.room_for
            rooms = room(n_rows), room(n_cols), room(nnz)
            launch = build.small(*rooms, dtype, edges.device_number, both=both)
            return _small(launch, sizes, report, index, (target, source))
        rows = _large(sizes, report, index, (target, source), source, transposed=False)
    return rows, columns_of(rows) if both else None


def _small(
    launch: build.Small, sizes: Sizes, report: Report, like: Tensor, ids: tuple[int, int]
) -> tuple[BuiltArrays, BuiltArrays | None]:
    """Build few edges in one launch."""
    memory = like.new_empty(launch.size // _ITEM, dtype=torch.float32)
    scratch = like.new_empty(launch.scratch // _ITEM, dtype=torch.float32)
    reports, begin = (report.address, report.address + LINE), memory.data_ptr()
    room, progress = scratch.data_ptr(), progress_of(report)
    launch(ids, sizes[:3], begin, reports, room, progress, report.stream)
    rows = BuiltArrays(launch.rows, sizes, memory, report)
    if launch.columns is None:
        return rows, None
    flipped = sizes._replace(n_rows=sizes.n_cols, n_cols=sizes.n_rows)
    return rows, BuiltArrays(launch.columns, flipped, memory, report, 1, launch.rows.size)


def columns_of(rows: BuiltArrays) -> BuiltArrays:
    """Build the rows of the transpose; their ``perm`` leads to the entries of ``rows``."""
    sizes = rows.sizes._replace(n_rows=rows.sizes.n_cols, n_cols=rows.sizes.n_rows)
    ids = rows.structure.indices, 0
    with Report(rows.report.device) as report:
        return _large(sizes, report, rows.memory, ids, rows.structure.indptr, transposed=True)


def _large(
    sizes: Sizes, report: Report, like: Tensor, ids: tuple[int, int], minor: int,
    *, transposed: bool,
) -> BuiltArrays:  # fmt: skip
    """Build many edges in several launches, from addresses ``ids`` and ``minor``."""
    at = build.layout(*sizes, report.device, transposed=transposed)
    memory = like.new_empty(at.size // _ITEM, dtype=torch.float32)
    keys = like.new_empty(at.nnz, dtype=DTYPES[at.key_dtype])
    begin, address, stream = memory.data_ptr(), report.address, report.stream
    build.keys(at, begin, ids, keys.data_ptr(), address, stream)
    keys, order = torch.sort(keys, stable=True)
    words = order.new_empty(at.n_rows + 1)
    places = keys.data_ptr(), order.data_ptr(), minor, words.data_ptr()
    build.rows(at, begin, *places, stream, transposed=transposed)
    words.cumsum_(0)
    build.chunks(at, begin, words.data_ptr(), address, stream)
    return BuiltArrays(at, sizes, memory, report, small=False)
