"""The tensors of a graph: rows, columns and edge values, and what is made of them once."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..formats.built import Built
from ..formats.compressed import CSC, CSR
from ..interop.edges import Edges
from ..interop.torch import from_tensor, to_tensor
from ..ops.engine.build import Findings
from ..ops.engine.structure import Structure, built_for, structure_of
from ._build import Arrays, columns_of, sides_of
from ._memory import on_device
from ._reports import Report, mark


class _OfStructure:
    """Tensors of a structure, and what is made once of them alone."""

    def __init__(self, leaf: Any) -> None:
        self.device: Any = getattr(leaf, "device", None)  # a tracer's leaf may be anything
        self._built = Built()
        self._marks: dict[Any, Report] = {}  # of what a stream may still be making

    def kept(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that name, made at the first call; anew where it cannot stay."""
        if torch.compiler.is_compiling():
            return make()
        found: Tensor | None = self._built.found.get(key)
        if found is None:
            return self._make(key, make)
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
        return self._plan if arrays is None else arrays.plan()

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
    def over(cls, arrays: Arrays, perm: Tensor | None) -> "Side":
        """Make a side over arrays that the current stream is building."""
        built = built_for(arrays.structure, arrays.csr)
        parts = arrays.indptr, arrays.indices, arrays.at.n_cols
        found = cls(*parts, [], perm, arrays.structure, built)
        found.arrays = arrays
        return found

    def reach(self) -> bool:
        """Let the current stream read what is being built, and tell whether that is done."""
        arrays = self.arrays
        if arrays is None or not arrays.report.reach():
            return arrays is None
        self.structure = arrays.settled()
        return True

    def wait(self) -> None:
        """Wait for what is being built."""
        if self.arrays is not None:
            self.arrays.report.wait()

    def freeze(self) -> None:
        """Wait for what is being built, and let go of all that a CSR has not."""
        arrays = self.arrays
        if arrays is not None:
            self._plan, self.structure = arrays.plan(), arrays.settled()
            self.arrays = None

    def inverse_degree(self, dtype: torch.dtype) -> Tensor:
        """Return 1 over the number of entries, 1 for an empty row: (n_rows,)."""
        arrays = self.arrays
        if arrays is not None and dtype is torch.float32:
            return arrays.inverse_degree()
        return self.kept(dtype, lambda: self._inverse_degree(dtype))

    def _inverse_degree(self, dtype: torch.dtype) -> Tensor:
        lengths = (self.indptr[1:] - self.indptr[:-1]).clamp(min=1)
        return lengths.to(torch.float64).reciprocal().to(dtype)


class GraphTensors(_OfStructure):
    """The tensors of a graph: its rows, its edge values and, once needed, its columns.

    ``csr_values`` are in CSR order.  ``order`` is ``Graph.csr_perm``: None where the edges were
    given in CSR order and, of a graph, until it is ``ordered``.  ``building`` is what a stream may
    still be at.
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
        super().__init__(rows.indices)
        self.rows, self.columns, self.csr_values = rows, columns, csr_values
        self.order, self.ordered = order, ordered
        self.n_rows, self.n_cols, self.nnz = sizes
        self.kind: str = getattr(self.device, "type", "")
        self.building: tuple[Side | Report, ...] = ()
        self.loops: bool | None = None  #: whether an edge is one, None where nobody has looked

    @classmethod
    def of_edges(cls, edges: Edges, *, both: bool) -> "GraphTensors":
        """Build the rows of edges on the current stream, and if ``both`` the columns."""
        arrays, of_columns = sides_of(edges, both=both)
        rows, values = Side.over(arrays, None), edges.weight
        values = None if values is None else values.detach().index_select(0, arrays.perm)
        found = cls(rows, None, values, (*edges.shape, edges.nnz), arrays.perm)
        found.building = (rows,) if values is None else (rows, mark(edges.device_number))
        if of_columns is not None:
            found._add(of_columns)
        return found

    def _add(self, columns: Arrays) -> None:
        self.columns = Side.over(columns, columns.perm)
        self.building = *self.building, self.columns

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
        left = tuple(one for one in self.building if not one.reach())
        arrays = self.rows.arrays
        if arrays is not None and arrays.report.found is not None:
            self._look(arrays.report.found)
        self.building = left

    def wait(self) -> None:
        """Wait for what is being built; errors are those of ``settle``."""
        for one in self.building:
            one.wait()
        self.settle()

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
        for side in (self.rows, self.columns):
            if side is not None:
                side.freeze()

    def numbered_csr(self) -> tuple[CSR, Any]:
        """Give the rows that were built of edges as a CSR, and the numbers of its entries."""
        self.wait()
        arrays = cast(Arrays, self.rows.arrays)
        values = None if self.csr_values is None else from_tensor("values", self.csr_values)
        order = None if arrays.in_order() else from_tensor("perm", arrays.perm)
        return arrays.csr().with_data(values), order

    def numbered_csc(self) -> tuple[CSC, Any] | None:
        """Give the columns that were built of edges as a CSC, and the places of its entries."""
        arrays = None if self.columns is None else self.columns.arrays
        if arrays is None:
            return None
        self.wait()
        values = None if self.csr_values is None else self.csr_values.index_select(0, arrays.perm)
        data = None if values is None else from_tensor("values", values)
        return arrays.csr().with_data(data).T, from_tensor("perm", arrays.perm)

    def inverse(self) -> Tensor:
        """Return the inverse of ``order``: the place in CSR order of each edge of the user's."""
        order = cast(Tensor, self.order)

        def make() -> Tensor:
            found = torch.empty_like(order)
            found[order] = torch.arange(self.nnz, dtype=order.dtype, device=order.device)
            return found

        return self.kept("inverse", make)
