"""The tensors of a graph: rows, columns, edge values and the user's order, each built once."""

from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...formats.arrays import finish
from ...formats.compressed import CSC, CSR
from ...graph.built import GraphBuilt
from ...interop.torch import from_tensor, to_tensor
from ..engine.memory import on_device, out_of_inference, raw_stream
from . import lifetimes
from .build import BuiltArrays, columns_of, sides_of
from .reports import Report, check_all, record
from .side import Side as Side
from .side import TensorStore

#: Polls, after a build is done, until launches are prepared for the sizes of this graph alone:
#: those of about three steps of a model.  A graph that is used in one step never comes so far.
_CALLS_UNTIL_EXACT = 12


class GraphTensors(TensorStore):
    """The tensors of a graph: its rows, its edge values and, once they are read, its columns.

    ``csr_values`` are edge values in CSR order; ``order[e]`` is the place of the e-th of them in
    the user's order, as ``Graph.csr_perm``, None if the orders are the same and builds were seen
    done.  ``pending`` are reports of those that were not.  ``source`` is the graph's
    ``GraphBuilt``, and True for its transpose; None for a tracer, for which nothing is built.
    """

    order: Tensor | None

    def __init__(
        self,
        rows: Side,
        csr_values: Tensor | None,
        sizes: tuple[int, int, int],
        source: tuple[GraphBuilt, bool] | None = None,
        *,
        columns: Side | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__(rows)
        self.rows, self.csr_values, self._source = rows, csr_values, source
        self.n_rows, self.n_cols, self.nnz = sizes
        self.kind: str = getattr(self.device, "type", "")
        self._columns = columns
        if source is None:
            self.order = order
        self.pending: tuple[Report, ...] = ()
        self.calls_until_exact = 0  #: polls until sides use exact sizes
        self.loops: bool | None = None  #: whether an edge is a loop, None if no build has told
        self.stream: int | None = None  #: that built and owns the arrays, None for formats

    @classmethod
    def of_formats(cls, built: GraphBuilt, flipped: bool) -> "GraphTensors":
        """Make the tensors over the CSR of a graph, or of its transpose."""
        refuse_capture(built, flipped)
        csr = built.rows(flipped)
        values = None if csr.data is None else to_tensor(csr.data)
        made = cls(Side.of(csr, None), values, (*csr.shape, csr.nnz), (built, flipped))
        finish(csr.indptr)  # synchronize!
        return made

    @classmethod
    def of_edges(cls, built: GraphBuilt, *, both: bool) -> "GraphTensors":
        """Build the rows of edges on the current stream, and if ``both`` the columns."""
        edges: Any = built.edges
        with on_device(edges.device_number):
            check_all()
            arrays, of_columns = sides_of(edges, both=both)
            rows, values = Side.over(arrays, transposed=False), edges.weight
            if values is not None:
                *_, order = arrays.views
                values = values.detach().index_select(0, order)
            made = cls(rows, values, (*edges.shape, edges.nnz), (built, False))
            report = arrays.report
            of_values = () if values is None else (record(edges.device_number),)
            made.pending, made.stream = (report, *of_values), report.stream
            if of_columns is not None:
                made._add(of_columns)
        built.torch_rows = ref(made)
        return made

    def current(self) -> "GraphTensors":
        """Return the tensors, ready for launches on the current stream; backward calls it too.

        Raises
        ------
        IndexRangeError
            If an edge names a vertex that does not exist, and the build has reported that.
        """
        if torch.compiler.is_compiling():
            return self
        pending = self.pending
        if self.calls_until_exact or (pending and not pending[-1].is_queued_here()):
            self.poll()
        if self.stream is not None and raw_stream(self.device.index) != self.stream:
            self.record_stream()
        if lifetimes.noted is not None:
            lifetimes.note(self)
        return self

    def side(self, transposed: bool) -> Side:
        """Return the rows of the graph, or of its transpose."""
        return self.columns if transposed else self.rows

    @property
    def columns(self) -> Side:
        """Return the rows of the transpose, built when they are first read."""
        # A tracer must not read that they are missing: it would guard that.
        if torch.compiler.is_compiling() or self._columns is None:
            self._build_columns()
        return cast(Side, self._columns)

    def __getattr__(self, name: str) -> Any:
        """Make ``order`` at first use; ``freeze`` makes it for a tracer."""
        if name != "order" or self._source is None:
            raise AttributeError(name)
        (built, flipped), arrays = self._source, self.rows.arrays
        with built.lock, torch.inference_mode(False):
            if arrays is not None:
                *_, self.order = arrays.views
            else:
                numbers = built.numbers(flipped)
                self.order = None if numbers is None else to_tensor(numbers)
        return self.order

    def _build_columns(self) -> bool:
        """Build the columns, if they are missing."""
        if self._source is None:
            return True
        (built, flipped), arrays = self._source, self.rows.arrays
        # Tensors made in inference mode could never take part in training.
        with built.lock, out_of_inference():
            if self._columns is not None:
                return True
            if arrays is not None and ("csc", False) not in built.parts and is_eager():
                with on_device(self.device.index):
                    self.poll()
                    self._add(columns_of(arrays))
                return True
            refuse_capture(built, flipped)
            csr = built.rows(not flipped)
            columns = Side.of(csr, built.places(flipped))
            finish(csr.indptr)  # synchronize!
            self._columns = columns
        return True

    # torch.compile runs this while it traces, and takes its True for a constant.
    _build_columns._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def built_scales(self) -> tuple[Tensor, Tensor] | None:
        """Return the float32 factors of ``autograd.unit_scales`` if the build has computed them."""
        arrays = self.rows.arrays
        return None if arrays is None or self.csr_values is not None else arrays.unit_scales

    def _sides(self) -> list[Side]:
        """List the sides that are built."""
        return [self.rows] if self._columns is None else [self.rows, self._columns]

    def _add(self, columns: BuiltArrays) -> None:
        """Keep the columns that the current stream is building."""
        made = Side.over(columns, transposed=True)
        with self._cache.lock:
            self._columns = made
            if columns.report not in self.pending:
                self.pending = *self.pending, columns.report

    def poll(self) -> None:
        """Read the reports of builds, and let the current stream wait for those not done.

        Findings on rows set ``loops``, and ``order`` to None if no edge has moved.  When all is
        done sides know which rows are cut, and ``_CALLS_UNTIL_EXACT`` calls later they use exact
        sizes.  Threads may count these calls wrong by a few, which does no harm.
        """
        pending = self.pending
        if not pending:
            self.calls_until_exact -= 1
            if self.calls_until_exact <= 0:  # a few steps have used it
                self.calls_until_exact = 0
                for side in self._sides():
                    side.use_exact()
            return
        if pending[-1].is_queued_here():
            return
        with self._cache.lock:  # another thread may add the columns
            left = [report for report in self.pending if not report.wait_on_stream()]
            arrays = self.rows.arrays
            findings = None if arrays is None else arrays.findings
            if findings is not None:
                self.loops = bool(findings.loops)
                if not findings.moved:
                    self.order = None
            if not left:
                self.calls_until_exact = _CALLS_UNTIL_EXACT
                for side in self._sides():
                    side.use_reported()
            self.pending = tuple(left)

    def record_stream(self) -> None:
        """Keep torch from reusing memory of ``stream`` while the current one may read it."""
        if not torch.cuda.is_current_stream_capturing():  # then ``lifetimes`` keep the memory
            stream = torch.cuda.current_stream(self.device)
            memory = [side.arrays.memory for side in self._sides() if side.arrays is not None]
            for part in (*memory, self.csr_values, *(made for _, made in self._cache.items())):
                if isinstance(part, Tensor):
                    part.record_stream(stream)

    def wait(self) -> None:
        """Let the host wait for all builds; errors are those of ``current``."""
        for report in self.pending:
            report.wait()
        self.poll()
        self.calls_until_exact = min(self.calls_until_exact, 1)

    def parts(self) -> list[Any]:
        """List what a captured CUDA graph has to keep alive beside the tensors that it reads.

        Tiles too: ``drop_tiles`` may drop the graph's own reference later.
        """
        stores = [self._cache]
        for side in self._sides():
            stores += [side._cache, *([] if side.built is None else [side.built])]
        order = self.__dict__.get("order") if self.rows.arrays is None else self.order
        return [order, *(made for store in stores for _, made in store.items())]

    def freeze(self) -> bool:
        """Wait for builds, make CSR and ``order``, and drop ``arrays``: nothing changes after."""
        if self.rows.arrays is None or self._source is None:
            _ = self.order
            return True
        built = self._source[0]
        with built.lock:
            built.csr()  # over the same memory
            if self._columns is not None:
                built.csc()
            self.wait()
            _ = self.order
            for side in self._sides():
                side.freeze()
        return True

    freeze._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def numbered_csr(self) -> tuple[CSR, Any]:
        """Return the rows built from edges as a CSR, and ``order``: as ``convert.numbered_csr``."""
        self.wait()
        arrays = cast(BuiltArrays, self.rows.arrays)
        values = None if self.csr_values is None else from_tensor("values", self.csr_values)
        *_, order = arrays.views
        moved = arrays.report.wait()[0].moved
        return arrays.csr.with_data(values), from_tensor("perm", order) if moved else None

    def numbered_csc(self) -> tuple[CSC, Any] | None:
        """Return the columns built from edges as a CSC, and its entries' places in CSR order."""
        arrays = None if self._columns is None else self._columns.arrays
        if arrays is None:
            return None
        self.wait()
        *_, perm = arrays.views
        values = None if self.csr_values is None else self.csr_values.index_select(0, perm)
        data = None if values is None else from_tensor("values", values)
        return arrays.csr.with_data(data).T, from_tensor("perm", perm)

    def inverse(self) -> Tensor:
        """Return the inverse of ``order``, which is not None: each edge's place in CSR order."""
        order = cast(Tensor, self.order)

        def make() -> Tensor:
            places = torch.empty_like(order)
            places[order] = torch.arange(self.nnz, dtype=order.dtype, device=order.device)
            return places

        return self.cached("inverse", make)


def is_eager() -> bool:
    """Return True outside of ``torch.compile`` and of the capture of a CUDA graph."""
    return not torch.compiler.is_compiling() and not torch.cuda.is_current_stream_capturing()


def refuse_capture(built: GraphBuilt, flipped: bool) -> None:
    """Raise if a CUDA graph is being captured, which cannot wait for rows or columns."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and torch.cuda.is_current_stream_capturing():
        shape = built.source.shape[::-1] if flipped else built.source.shape
        raise UnsupportedError(
            f"a graph of shape {tuple(shape)} would be built in the capture of a CUDA graph, which "
            "cannot wait for it, and whose replays would not build it again: make it before, run a "
            "step with it, and capture one function for each graph, or pad graphs to one."
        )
