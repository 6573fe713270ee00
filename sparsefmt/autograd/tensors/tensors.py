"""The tensors of a graph: rows, columns and edge values, and what is made of them once."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ...formats.built import Built
from ...formats.compressed import CSC, CSR
from ...graph.edges import Edges
from ...interop.torch import from_tensor, to_tensor
from ...ops.engine.build import Findings
from ...ops.engine.structure import Structure, built_for, structure_of
from ..engine.memory import on_device
from .build import Arrays, columns_of, sides_of
from .reports import Report, mark

#: How often a graph that has been built is asked for before its launches are decided for it alone:
#: in three steps of a layer, forward and backward.
_MOST_ASKED = 32


class _OfStructure:
    """Tensors of a structure, and what is made once of them alone."""

    def __init__(self, leaf: Any, built: Built | None = None) -> None:
        self.device: Any = getattr(leaf, "device", None)  # a tracer's leaf may be anything
        self._built = Built() if built is None else built
        self._marks: dict[Any, Report] = {}  # of what a stream may still be making

    def kept(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that name, made at the first call; anew where it cannot stay."""
        if torch.compiler.is_compiling():
            return make()
        found: Tensor | None = self._built.found.get(key)
        if found is None:
            found = self._make(key, make)  # or get what another thread makes at this time
        return found if not self._marks else self._reached(key, found, make)

    def _reached(self, key: Any, found: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Let the current stream read what another one may still be making."""
        report = self._marks.get(key)
        if report is None:
            return found
        if not report.done() and torch.cuda.is_current_stream_capturing():
            return make()  # a capture cannot wait
        if report.reach():
            self._marks.pop(key, None)
        return found

    def _make(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Make the tensor of that name, on no tape; streams that did not make it wait for it."""
        cuda = self.device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return make()  # memory of that CUDA graph

        def build() -> Tensor:
            with torch.inference_mode(False), torch.no_grad():
                made = make()
            if cuda and type(made) is Tensor:
                with on_device(self.device.index):
                    self._marks[key] = mark(self.device.index)
            return made

        return self._built.ask(key, build, lambda made: type(made) is Tensor)  # no tracer's


class Side(_OfStructure):
    """One orientation of a structure: CSR of ``A``, or of its transpose.

    ``perm`` tells the number of each entry in the order of the edge values, None where it is its
    own; ``plan`` holds the arrays of ``CSR.chunks`` on a GPU and is empty on the CPU.
    ``structure`` is what the launchers of a GPU read, and ``built`` what they find by its place in
    memory, so that a library op takes the structure alone; None on the CPU and for a tracer's
    leaves.  The tensors that are made of it go with the last side over the same arrays.
    ``arrays`` are those that torch's stream has built, None where they came from a CSR.
    """

    arrays: "Arrays | None" = None
    _numbered = True  # whether ``perm`` is wanted of them

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        n_cols: int,
        plan: list[Tensor],
        perm: Tensor | None,
        structure: Structure | None = None,
        built: Built | None = None,
    ) -> None:
        super().__init__(indices)
        self.indptr, self.indices, self.n_cols = indptr, indices, n_cols
        self._plan, self.perm = plan, perm
        self.structure, self.built = structure, built

    @property
    def plan(self) -> list[Tensor]:
        """The arrays of ``CSR.chunks``, whose sizes wait for the build."""
        arrays = self.arrays
        if arrays is None:
            return self._plan
        found = arrays.plan()
        self.settle()
        return found

    @classmethod
    def of(cls, csr: CSR, perm: Any) -> "Side":
        """Make the tensors over the arrays of ``csr``."""
        order = None if perm is None else to_tensor(perm)
        parts = to_tensor(csr.indptr), to_tensor(csr.indices), csr.n_cols
        if csr.device == "cpu":
            return cls(*parts, [], order)
        # Only kernels on a GPU cut their work in chunks.
        plan = [to_tensor(array) for array in csr.chunks.arrays()]
        structure, bare = structure_of(csr), csr.with_data(None)
        return cls(*parts, plan, order, structure, built_for(structure, lambda: bare))

    @classmethod
    def over(cls, arrays: Arrays, *, numbered: bool) -> "Side":
        """Make a side over arrays that the current stream is building, with ``perm`` if wanted."""
        found = cls.__new__(cls)
        _OfStructure.__init__(found, arrays.memory, arrays.built)
        found.arrays, found._numbered = arrays, numbered
        found._plan, found.n_cols = [], arrays.sizes.n_cols
        found.structure = arrays.structure
        if not arrays.small:
            _ = found.built
        return found

    def __getattr__(self, name: str) -> Any:
        """Make the views of what is being built once somebody asks for them: each takes 2 µs."""
        arrays = self.__dict__.get("arrays")
        if arrays is None or name not in ("indptr", "indices", "perm", "built"):
            raise AttributeError(name)
        if name == "built":
            self.built = built_for(arrays.structure, arrays.csr)
            return self.built
        self.indptr, self.indices, perm = arrays.views()
        self.perm = perm if self._numbered else None
        return self.__dict__[name]

    def take_over(self) -> None:
        """Read off a build that is done whether blocks share rows.

        No more: for exact sizes launches would be decided anew, for each graph that is used once.
        """
        arrays = self.arrays
        if arrays is not None:
            self.structure = arrays.settled() if arrays.is_settled() else arrays.without_cuts()

    def settle(self) -> None:
        """Take over exact sizes, which the build has reported."""
        if self.arrays is not None:
            self.structure = self.arrays.settled()
            _ = self.built

    def freeze(self) -> None:
        """Wait for the build, then keep only what a CSR has."""
        arrays = self.arrays
        if arrays is not None:
            _ = self.indptr, self.built
            self._plan, self.structure = arrays.plan(), arrays.settled()
            self.arrays = None

    def inverse_degree(self, dtype: torch.dtype) -> Tensor:
        """Return 1 over the number of entries, 1 for an empty row: (n_rows,)."""
        arrays = self.arrays
        if arrays is not None and dtype is torch.float32:
            return arrays.inverse_degree()
        return self.kept(dtype, lambda: self._inverse_degree(dtype))

    def inverse_degree_beside(self, like: Tensor) -> Tensor:
        """Return the same in the dtype in which sums of values like these run."""
        return self.inverse_degree(like.dtype if like.dtype.itemsize >= 4 else torch.float32)

    def _inverse_degree(self, dtype: torch.dtype) -> Tensor:
        lengths = (self.indptr[1:] - self.indptr[:-1]).clamp(min=1)
        return lengths.to(torch.float64).reciprocal().to(dtype)


class GraphTensors(_OfStructure):
    """The tensors of a graph: its rows, its edge values and, once needed, its columns.

    ``csr_values`` are in CSR order.  ``order`` is ``Graph.csr_perm``: None where the edges were
    given in CSR order and, of a graph, until it is ``ordered``.  ``building`` are the reports of
    what a stream may still be at.
    """

    def __init__(
        self,
        rows: Side,
        columns: Side | None,
        csr_values: Tensor | None,
        sizes: tuple[int, int, int],
        order: Tensor | None = None,
        *,
        ordered: bool = True,
    ) -> None:
        super().__init__(rows)
        self.rows, self.columns, self.csr_values = rows, columns, csr_values
        self.order, self.ordered = order, ordered
        self.n_rows, self.n_cols, self.nnz = sizes
        self.kind: str = getattr(self.device, "type", "")
        self.building: tuple[Report, ...] = ()
        self.asks_left = 0  #: until exact sizes of what was built are taken over
        self.loops: bool | None = None  #: whether an edge is one, None where nobody has looked
        self.home: int | None = None  #: the stream whose memory this is, None for that of formats

    @classmethod
    def of_edges(cls, edges: Edges, *, both: bool) -> "GraphTensors":
        """Build the rows of edges on the current stream, and if ``both`` the columns."""
        arrays, of_columns = sides_of(edges, both=both)
        rows, values = Side.over(arrays, numbered=False), edges.weight
        values = None if values is None else values.detach().index_select(0, arrays.views()[2])
        found = cls(rows, None, values, (*edges.shape, edges.nnz))
        del found.order  # made when asked for
        report = arrays.report
        found.building = (report,) if values is None else (report, mark(edges.device_number))
        found.home = report.stream
        if of_columns is not None:
            found._add(of_columns)
        return found

    def built_scales(self) -> tuple[Tensor, Tensor] | None:
        """Return what ``autograd.unit_scales`` computes, in float32, if the build has made it."""
        arrays = self.rows.arrays
        return None if arrays is None or self.csr_values is not None else arrays.unit_scales()

    def __getattr__(self, name: str) -> Any:
        """Make the view of the edges' numbers once somebody asks for it."""
        rows = self.__dict__.get("rows")
        if name != "order" or rows is None or rows.arrays is None:
            raise AttributeError(name)
        self.order = rows.arrays.views()[2]
        return self.order

    def _add(self, columns: Arrays) -> None:
        made = Side.over(columns, numbered=True)
        with self._built.lock:
            self.columns = made
            if columns.report not in self.building:
                self.building = *self.building, columns.report

    def build_columns(self) -> None:
        """Build the columns on the current stream."""
        self.settle()
        self._add(columns_of(cast(Arrays, self.rows.arrays)))

    def settle(self) -> None:
        """Let the current stream read what is being built; take what is done as it is.

        Raises
        ------
        IndexRangeError
            If an edge names a vertex that does not exist, and the GPU has come so far.
        """
        building = self.building
        if not building:
            self.asks_left -= 1
            if self.asks_left <= 0:
                self._settle_sides()
            return
        if building[-1].is_ahead():
            return
        with self._built.lock:  # another thread may add the columns
            left = [one for one in self.building if not one.reach()]
            arrays = self.rows.arrays
            found = None if arrays is None else arrays.found()
            if found is not None:
                self._look(found)
            if not left:
                self.asks_left = _MOST_ASKED
                self.rows.take_over()
                if self.columns is not None:
                    self.columns.take_over()
            self.building = tuple(left)

    def lend(self) -> None:
        """Keep memory that another stream has built until the current one has read it.

        Torch gives memory that is let go back to the stream that it comes from, at once.
        """
        if not torch.cuda.is_current_stream_capturing():  # whose owner keeps the graph
            stream = torch.cuda.current_stream(self.device)
            sides = [side for side in (self.rows, self.columns) if side is not None]
            held = [side.arrays.memory for side in sides if side.arrays is not None]
            for one in (*held, self.csr_values, *(made for _, made in self._built.items())):
                if isinstance(one, Tensor):
                    one.record_stream(stream)

    def _settle_sides(self) -> None:
        """Take over exact sizes, once a few steps have asked for a graph that has been built."""
        self.asks_left = 0
        for side in (self.rows, self.columns):
            if side is not None:
                side.settle()

    def wait(self) -> None:
        """Wait for what is being built; errors are those of ``settle``."""
        for one in self.building:
            one.wait()
        self.settle()
        self.asks_left = min(self.asks_left, 1)

    def _look(self, found: Findings) -> None:
        """Take over what the build of the rows has found."""
        self.loops = bool(found.loops)
        if not found.moved:
            self.order = None

    def parts(self) -> list[Any]:
        """Give all that kernels read of the graph now, tiles too, some of which may be dropped."""
        held = [self._built]
        for side in (self.rows, self.columns):
            if side is not None:
                held += [side._built, *([] if side.built is None else [side.built])]
        return [self.order, *(one for built in held for _, one in built.items())]

    def freeze(self) -> None:
        """Wait for what is being built; from then on sides are as those of formats."""
        self.wait()
        _ = self.order
        for side in (self.rows, self.columns):
            if side is not None:
                side.freeze()

    def numbered_csr(self) -> tuple[CSR, Any]:
        """Give the rows that were built of edges as a CSR, and the numbers of its entries."""
        self.wait()
        arrays = cast(Arrays, self.rows.arrays)
        values = None if self.csr_values is None else from_tensor("values", self.csr_values)
        order = None if arrays.in_order() else from_tensor("perm", arrays.views()[2])
        return arrays.csr().with_data(values), order

    def numbered_csc(self) -> tuple[CSC, Any] | None:
        """Give the columns that were built of edges as a CSC, and the places of its entries."""
        arrays = None if self.columns is None else self.columns.arrays
        if arrays is None:
            return None
        self.wait()
        perm = arrays.views()[2]
        values = None if self.csr_values is None else self.csr_values.index_select(0, perm)
        data = None if values is None else from_tensor("values", values)
        return arrays.csr().with_data(data).T, from_tensor("perm", perm)

    def inverse(self) -> Tensor:
        """Return the inverse of ``order``: the place in CSR order of each edge of the user's."""
        order = cast(Tensor, self.order)

        def make() -> Tensor:
            found = torch.empty_like(order)
            found[order] = torch.arange(self.nnz, dtype=order.dtype, device=order.device)
            return found

        return self.kept("inverse", make)
