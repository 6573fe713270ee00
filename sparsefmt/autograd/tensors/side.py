"""One orientation of a structure as tensors, and what is made of these once."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...formats.arrays import Array
from ...formats.base import Built
from ...formats.compressed import CSR
from ...interop.torch import to_tensor
from ...ops.engine.structure import Structure, built_for, structure_of
from ..engine.memory import on_device
from .build import Arrays
from .reports import Report, mark


class TensorStore:
    """Tensors of a structure, and what is made once of them alone."""

    def __init__(self, leaf: Any) -> None:
        self.device: Any = getattr(leaf, "device", None)  # a tracer's leaf may be anything
        self._built = Built()
        self._marks: dict[Hashable, Report] = {}  # reports on what a stream may still make

    def cached(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that ``make()`` returned for ``key`` at the first call.

        Anew where ``torch.compile`` traces, and in a capture unless it is there and done.
        """
        if torch.compiler.is_compiling():
            return make()
        cached: Tensor | None = self._built.found.get(key)
        if cached is None:
            cached = self._make(key, make)  # or get what another thread makes at this time
        return cached if not self._marks else self._reached(key, cached, make)

    def _reached(self, key: Hashable, cached: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Let the current stream read what another one may still be making."""
        report = self._marks.get(key)
        if report is None:
            return cached
        if not report.done() and torch.cuda.is_current_stream_capturing():
            return make()  # a capture cannot wait
        if report.reach():
            self._marks.pop(key, None)
        return cached

    def _make(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Make a tensor without a gradient and keep it by ``key``; do not keep it in a capture."""
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


class Side(TensorStore):
    """One orientation of a structure: CSR of ``A``, or of its transpose.

    ``perm`` tells the place of each entry in ``csr_values``, in CSR order of the graph, None for
    its rows; ``plan`` holds the arrays of ``CSR.chunks`` on a GPU and is empty on the CPU.
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
        """Return the arrays of ``CSR.chunks``, whose sizes wait for the build."""
        arrays = self.arrays
        if arrays is None:
            return self._plan
        plan = arrays.plan
        self.settle()
        return plan

    @classmethod
    def of(cls, csr: CSR, perm: Array | None) -> "Side":
        """Make the tensors over the arrays of ``csr``."""
        order = None if perm is None else to_tensor(perm)
        parts = to_tensor(csr.indptr), to_tensor(csr.indices), csr.n_cols
        if csr.device == "cpu":
            return cls(*parts, [], order)
        # Only kernels on a GPU cut their work in chunks.
        plan = [to_tensor(array) for array in csr.chunks.arrays()]
        structure, without_values = structure_of(csr), csr.with_data(None)
        built = built_for(structure, lambda: without_values)
        return cls(*parts, plan, order, structure, built)

    @classmethod
    def over(cls, arrays: Arrays, *, numbered: bool) -> "Side":
        """Make a side over arrays that the current stream is building, with ``perm`` if wanted."""
        side = cls.__new__(cls)
        TensorStore.__init__(side, arrays.memory)
        side.arrays, side._numbered = arrays, numbered
        side._plan, side.n_cols = [], arrays.sizes.n_cols
        side.structure = arrays.structure
        if not arrays.small:
            _ = side.built
        return side

    def __getattr__(self, name: str) -> Any:
        """Make the views of what is being built once somebody asks for them: each takes 2 µs."""
        arrays = self.__dict__.get("arrays")
        if arrays is None or name not in ("indptr", "indices", "perm", "built"):
            raise AttributeError(name)
        if name == "built":
            self.built = built_for(arrays.structure, lambda: arrays.csr)
            return self.built
        self.indptr, self.indices, perm = arrays.views
        self.perm = perm if self._numbered else None
        return self.__dict__[name]

    def take_over(self) -> None:
        """Set ``structure`` to one without shared rows, if a build that is done reports none.

        No more: for exact sizes launches would be decided anew, for each graph that is used once.
        """
        if self.arrays is not None:
            self.structure = self.arrays.known_structure()

    def settle(self) -> None:
        """Set ``structure`` to that of the exact sizes, waiting for the build; make ``built``."""
        if self.arrays is not None:
            self.structure = self.arrays.exact
            _ = self.built

    def freeze(self) -> None:
        """Wait for the build, set ``plan`` and ``structure`` to exact ones, and drop ``arrays``."""
        arrays = self.arrays
        if arrays is not None:
            _ = self.indptr, self.built
            self._plan, self.structure = arrays.plan, arrays.exact
            self.arrays = None

    def inverse_degree(self, dtype: torch.dtype) -> Tensor:
        """Return 1 over the number of entries, 1 for an empty row: (n_rows,)."""
        arrays = self.arrays
        if arrays is not None and dtype is torch.float32:
            return arrays.inverse_degree

        def make() -> Tensor:
            lengths = (self.indptr[1:] - self.indptr[:-1]).clamp(min=1)
            return lengths.to(torch.float64).reciprocal().to(dtype)

        return self.cached(dtype, make)
