"""How ``bridge_sampling`` calls an op that takes ``indptr`` beside its structure; to be deleted."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import _cuda, _library
from .bridge import Op
from .structure import Side

_structure: Any = _cuda.of_tensors(lambda structure: structure)


def _of_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], *args: Any) -> Any:
        return kernel(_structure(indptr, indices, n_cols, plan), indptr, *args)

    return run


class NormOp(Op):
    """A library op whose kernel takes ``indptr`` as a tensor beside the structure."""

    def __call__(self, side: Side, *args: Any) -> Any:
        """By the short way where nothing can tell."""
        if _library.needs_no_dispatcher(side, args):
            return self.kernel(side.structure, side.indptr, *args)
        return self.library(side.indptr, side.indices, side.n_cols, side.plan, *args)
