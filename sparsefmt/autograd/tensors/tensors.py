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
from .build import Arrays, columns_of, sides_of
from .reports import Report, check_all, mark
from .side import Side as Side
from .side import TensorStore

#: How often a graph that has been built is asked for before its launches are decided for it alone:
#: in three steps of a layer, forward and backward.
_MOST_ASKED = 12


class GraphTensors(TensorStore):
    """The tensors of a graph: its rows, its edge values and, once they are read, its columns.

    ``csr_values`` are in CSR order, to which ``order`` leads from the user's, ``Graph.csr_perm``;
    None where the edges were given in it.  ``building`` are the reports of what a stream may still
    be at.  ``source`` holds the formats that all is made of, and whether of their transpose; None
    for a tracer's leaves, of which columns and order are given.
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
        self.building: tuple[Report, ...] = ()
        self.asks_left = 0  #: until exact sizes of what was built are taken over
        self.loops: bool | None = None  #: whether an edge is one, None where nobody has looked
        self.home: int | None = None  #: the stream whose memory this is, None for that of formats

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
            rows, values = Side.over(arrays, numbered=False), edges.weight
            values = None if values is None else values.detach().index_select(0, arrays.views[2])
            made = cls(rows, values, (*edges.shape, edges.nnz), (built, False))
            report = arrays.report
            marks = () if values is None else (mark(edges.device_number),)
            made.building, made.home = (report, *marks), report.stream
            if of_columns is not None:
                made._add(of_columns)
        built.torch_rows = ref(made)
        return made

    def current(self) -> "GraphTensors":
        """Return the tensors for launches on the current stream; each backward pass asks anew.

        Raises
        ------
        IndexRangeError
            If an edge names a vertex that does not exist, and the GPU has come so far.
        """
        if torch.compiler.is_compiling():
            return self
        building = self.building
        if self.asks_left or (building and not building[-1].is_ahead()):
            self.settle()
        if self.home is not None and raw_stream(self.device.index) != self.home:
            self.lend()
        if lifetimes.noted is not None:
            lifetimes.note(self)
        return self

    def side(self, transposed: bool) -> Side:
        """Return the rows of the graph, or of its transpose."""
        return self.columns if transposed else self.rows

    @property
    def columns(self) -> Side:
        """Return the rows of the transpose, built when they are first read."""
        # A tracer must not see what is missing: it remembers what it read.
        if torch.compiler.is_compiling() or self._columns is None:
            self._build_columns()
        return cast(Side, self._columns)

    def __getattr__(self, name: str) -> Any:
        """Make ``order`` once somebody asks for it; a tracer finds it made."""
        if name != "order" or self._source is None:
            raise AttributeError(name)
        (built, flipped), arrays = self._source, self.rows.arrays
        with built.lock, torch.inference_mode(False):
            if arrays is not None:
                self.order = arrays.views[2]
            else:
                numbers = built.numbers(flipped)
                self.order = None if numbers is None else to_tensor(numbers)
        return self.order

    def _build_columns(self) -> bool:
        """Build the columns, if they are missing."""
        if self._source is None:
            return True
        (built, flipped), arrays = self._source, self.rows.arrays
        # Tensors born in inference mode could never take part in training.
        with built.lock, out_of_inference():
            if self._columns is not None:
                return True
            if arrays is not None and ("csc", False) not in built.found and is_eager():
                with on_device(self.device.index):
                    self.settle()
                    self._add(columns_of(arrays))
                return True
            refuse_capture(built, flipped)
            csr = built.rows(not flipped)
            columns = Side.of(csr, built.places(flipped))
            finish(csr.indptr)  # synchronize!
            self._columns = columns
        return True

    # See ``Graph._fill``.
    _build_columns._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def built_scales(self) -> tuple[Tensor, Tensor] | None:
        """Return what ``autograd.unit_scales`` computes, in float32, if the build has made it."""
        arrays = self.rows.arrays
        return None if arrays is None or self.csr_values is not None else arrays.unit_scales

    def _sides(self) -> list[Side]:
        """List the sides that are built."""
        return [self.rows] if self._columns is None else [self.rows, self._columns]

    def _add(self, columns: Arrays) -> None:
        """Keep the columns that the current stream is building."""
        made = Side.over(columns, numbered=True)
        with self._built.lock:
            self._columns = made
            if columns.report not in self.building:
                self.building = *self.building, columns.report

    def settle(self) -> None:
        """Make the current stream wait for unfinished builds; drop reports of those that are done.

        A done build sets ``loops`` and maybe ``order``; after the last one each side takes over,
        and a few calls later each settles, with exact sizes.
        """
        building = self.building
        if not building:
            self.asks_left -= 1
            if self.asks_left <= 0:  # a few steps have read it: exact sizes
                self.asks_left = 0
                for side in self._sides():
                    side.settle()
            return
        if building[-1].is_ahead():
            return
        with self._built.lock:  # another thread may add the columns
            left = [report for report in self.building if not report.reach()]
            arrays = self.rows.arrays
            findings = None if arrays is None else arrays.findings
            if findings is not None:
                self.loops = bool(findings.loops)
                if not findings.moved:
                    self.order = None
            if not left:
                self.asks_left = _MOST_ASKED
                for side in self._sides():
                    side.take_over()
            self.building = tuple(left)

    def lend(self) -> None:
        """Keep memory that another stream has built until the current one has read it.

        Torch gives memory that is let go back to the stream that it comes from, at once.
        """
        if not torch.cuda.is_current_stream_capturing():  # whose owner keeps the graph
            stream = torch.cuda.current_stream(self.device)
            memory = [side.arrays.memory for side in self._sides() if side.arrays is not None]
            for part in (*memory, self.csr_values, *(made for _, made in self._built.items())):
                if isinstance(part, Tensor):
                    part.record_stream(stream)

    def wait(self) -> None:
        """Wait for what is being built; errors are those of ``current``."""
        for report in self.building:
            report.wait()
        self.settle()
        self.asks_left = min(self.asks_left, 1)

    def parts(self) -> list[Any]:
        """List all that kernels read of the graph now, tiles too, some of which may be dropped."""
        stores = [self._built]
        for side in self._sides():
            stores += [side._built, *([] if side.built is None else [side.built])]
        order = self.__dict__.get("order") if self.rows.arrays is None else self.order
        return [order, *(made for store in stores for _, made in store.items())]

    def freeze(self) -> bool:
        """Wait for builds, make CSR and ``order``, and drop the ``arrays`` of each side."""
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
        """Return the rows that were built of edges as a CSR, and the numbers of its entries."""
        self.wait()
        arrays = cast(Arrays, self.rows.arrays)
        values = None if self.csr_values is None else from_tensor("values", self.csr_values)
        order = from_tensor("perm", arrays.views[2]) if arrays.report.wait()[0].moved else None
        return arrays.csr.with_data(values), order

    def numbered_csc(self) -> tuple[CSC, Any] | None:
        """Return the columns that were built of edges as a CSC, and the places of its entries."""
        arrays = None if self._columns is None else self._columns.arrays
        if arrays is None:
            return None
        self.wait()
        perm = arrays.views[2]
        values = None if self.csr_values is None else self.csr_values.index_select(0, perm)
        data = None if values is None else from_tensor("values", values)
        return arrays.csr.with_data(data).T, from_tensor("perm", perm)

    def inverse(self) -> Tensor:
        """Return the inverse of ``order``: the place in CSR order of each edge of the user's."""
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
