"""A graph's rows, or its columns, as tensors, and a cache of tensors that are made of them."""

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
from .build import BuiltArrays
from .reports import Report, record


class TensorStore:
    """A cache of tensors that depend on a structure alone."""

    def __init__(self, leaf: Any) -> None:
        self.device: Any = getattr(leaf, "device", None)  # a tracer's leaf may be anything
        self._cache = Built()
        self._reports: dict[Hashable, Report] = {}  # of tensors that a stream may still be making

    def cached(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that ``make()`` returned for ``key`` at the first call.

        Make it anew where ``torch.compile`` traces, and in the capture of a CUDA graph unless it is
        cached and done.
        """
        if torch.compiler.is_compiling():
            return make()
        cached: Tensor | None = self._cache.parts.get(key)
        if cached is None:
            cached = self._make(key, make)  # or get it from another thread that makes it now
        return cached if not self._reports else self._wait_for_maker(key, cached, make)

    def _wait_for_maker(self, key: Hashable, cached: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Let the current stream wait for the one that makes a cached tensor; return the tensor."""
        report = self._reports.get(key)
        if report is None:
            return cached
        if not report.done() and torch.cuda.is_current_stream_capturing():
            return make()  # a capture cannot wait
        if report.wait_on_stream():
            self._reports.pop(key, None)
        return cached

    def _make(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Make a tensor without a gradient, and cache it by ``key`` unless in a capture."""
        cuda = self.device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return make()  # memory of that CUDA graph

        def build() -> Tensor:
            with torch.inference_mode(False), torch.no_grad():
                made = make()
            if cuda and type(made) is Tensor:
                with on_device(self.device.index):
                    self._reports[key] = record(self.device.index)
            return made

        return self._cache.ask(key, build, lambda made: type(made) is Tensor)  # no tracer's


class Side(TensorStore):
    """The rows of a graph as tensors of a CSR, or its columns: the rows of the transpose.

    ``perm`` is of columns: the place of each entry in CSR order of the graph, and so its value's in
    ``csr_values``; None for rows.  ``plan`` holds the arrays of ``CSR.chunks``, on the CPU none.
    ``structure`` is what launchers on a GPU read: sizes and addresses.  ``built`` is what was built
    of it, such as tiles, which they look up by its addresses; sides over the same arrays share it,
    and it goes with the last of them.  Both are None on the CPU and for a tracer's leaves.
    ``arrays`` are those that torch's stream builds from edges, None for a side made of a CSR.
    """

    arrays: "BuiltArrays | None" = None
    _transposed = True  # of a side over ``arrays``: whether it is columns, which have a ``perm``

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
        """Return the arrays of ``CSR.chunks``, waiting for the build, which decides their sizes."""
        arrays = self.arrays
        if arrays is None:
            return self._plan
        plan = arrays.plan
        self.use_exact()
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
    def over(cls, arrays: BuiltArrays, *, transposed: bool) -> "Side":
        """Make rows, or ``transposed`` columns, over arrays that the current stream builds."""
        side = cls.__new__(cls)
        TensorStore.__init__(side, arrays.memory)
        side.arrays, side._transposed = arrays, transposed
        side._plan, side.n_cols = [], arrays.sizes.n_cols
        side.structure = arrays.structure
        if not arrays.small:
            _ = side.built
        return side

    def __getattr__(self, name: str) -> Any:
        """Make views of ``arrays``, or ``built``, at first use: each takes 2 µs."""
        arrays = self.__dict__.get("arrays")
        if arrays is None or name not in ("indptr", "indices", "perm", "built"):
            raise AttributeError(name)
        if name == "built":
            self.built = built_for(arrays.structure, lambda: arrays.csr)
            return self.built
        self.indptr, self.indices, perm = arrays.views
        self.perm = perm if self._transposed else None
        return self.__dict__[name]

    def use_reported(self) -> None:
        """Set ``structure`` to one without cut rows, if the build has reported that none is cut.

        Its sizes stay those of the most blocks: see ``use_exact``.
        """
        if self.arrays is not None:
            self.structure = self.arrays.reported_structure()

    def use_exact(self) -> None:
        """Set ``structure`` to one of exact sizes, waiting for the build; make ``built``.

        Launches are then prepared for this graph alone, which pays if it is used again.
        """
        if self.arrays is not None:
            self.structure = self.arrays.exact
            _ = self.built

    def freeze(self) -> None:
        """Wait for the build, and become as a side of a CSR: exact, without ``arrays``."""
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
