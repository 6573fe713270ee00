"""What the convolutions share: MaxK's ``k``, samples of the rows, the bias."""

from typing import Any, ClassVar

from torch import Tensor, strided
from torch.nn import Module

from ..autograd import as_graph
from ..autograd.cbsr import features_to_keep
from ..autograd.sampling import checked_strategy, sample_width
from ..autograd.tensors.prepare import GraphLike
from ..errors import UnsupportedError
from ._inputs import by_vertex
from ._passing import Direction, Passing
from .shared import sampled_aggregate


class Balanced(Module):
    """A module that keeps ``k`` features of each row, or all of them where it is None."""

    def __init__(self, k: int | None, feat: int | None = None) -> None:
        super().__init__()
        self.k = None if k is None else features_to_keep(k, feat)

    def extra_repr(self) -> str:
        """What the ``repr`` shows."""
        return f"k={self.k}"


class PartOptions(Direction, total=False):
    """Keyword arguments of ``Convolution`` but for the aggregation: ours, and PyG's."""

    k: int | None
    sample: int | None
    training_sample: int | None
    strategy: str


class Options(PartOptions, total=False):
    """Keyword arguments of ``Convolution``."""

    aggr: Any


class Convolution(Passing):
    """A layer that keeps ``k`` features of each row, or goes over a sample of each row.

    Parameters
    ----------
    feat : int, optional
        Features that ``k`` chooses among.
    aggr
        PyG's aggregation.
    k, sample, training_sample, strategy
        As for ``GCNConv``.
    **passing
        As for ``Passing``.
    """

    #: Reductions of samples and of what MaxK keeps.
    _of_parts: ClassVar[tuple[tuple[str, ...], ...]] = (("sum",),)

    def __init__(
        self,
        feat: int | None = None,
        aggr: Any = "add",
        *,
        k: int | None = None,
        sample: int | None = None,
        training_sample: int | None = None,
        strategy: str = "fastrand",
        **passing: Any,
    ) -> None:
        super().__init__(aggr, **passing)
        parts = (k, sample, training_sample)
        if parts != (None,) * 3 and self._reductions not in self._of_parts:
            raise UnsupportedError(
                f"aggr is {aggr!r} beside k or a sample: no kernel reduces parts of rows so; give "
                f"{' or '.join(repr(one) for (one,) in self._of_parts)}, or leave them out."
            )
        self.k = None if k is None else features_to_keep(k, feat)
        self.sample = _sample_width("sample", sample, self.k)
        self.training_sample = _sample_width("training_sample", training_sample, self.k)
        self.strategy = checked_strategy(strategy)

    def _own_options(self) -> list[str]:
        """What the ``repr`` shows of our own options: those that are set."""
        names = ("k", "sample", "training_sample")
        given = [(name, getattr(self, name)) for name in names]
        shown = [f"{name}={value}" for name, value in given if value is not None]
        return shown if self.sample is None else [*shown, f"strategy={self.strategy!r}"]

    def _width(self) -> int | None:
        """Tell how many entries of each row to go over now; None for all."""
        if self.training:
            return _sample_width("training_sample", self.training_sample, self.k)
        return _sample_width("sample", self.sample, self.k)

    def _is_whole(self) -> bool:
        """Tell whether all features of all entries count."""
        sampled = self.training_sample if self.training else self.sample
        return sampled is None and self.k is None

    def _graph(self, x: Tensor, edge_index: Any) -> GraphLike:
        """Give the graph among the vertices of ``x``, with the values that count."""
        vertices = x if x.dim() == 2 else by_vertex(x)
        graph: GraphLike = as_graph(edge_index, vertices, name="edge_index")
        edges = type(edge_index) is Tensor and edge_index.layout is strided  # without values
        return graph if edges or graph is edge_index else self._valued(graph, edge_index)

    def _check_no_batch(self, x: Tensor) -> None:
        """Refuse features (..., n, feat) where MaxK is to choose."""
        if x.dim() > 2:
            raise UnsupportedError(
                f"x has shape {tuple(x.shape)} and k is {self.k}: MaxK chooses from the row of one "
                "vertex; give x[i] in turn, or leave k out."
            )

    def _aggregate(
        self,
        graph: GraphLike,
        x: Tensor,
        width: int,
        edge_weight: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Aggregate a sample of each row, drawn anew at each call while it trains."""
        strategy = "random" if self.training else self.strategy
        return sampled_aggregate(graph, x, width, edge_weight, strategy=strategy, **options)


def _sample_width(name: str, width: int | None, k: int | None) -> int | None:
    """Check how many entries of a row to sample, beside what MaxK keeps."""
    if width is None:
        return None
    found = sample_width(name, width)
    if k is not None:
        raise UnsupportedError(
            f"{name} is {found} and k is {k}: no kernel samples rows of what MaxK keeps, use one "
            "of them."
        )
    return found


def is_one_each(bias: Tensor | None, weight: Tensor) -> bool:
    """Tell whether a bias has a number for each output of a layer, as kernels read it."""
    return bias is None or bias.shape == weight.shape[:1]


def plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias in the dtype of ``y``, which autocast may have narrowed."""
    return y if bias is None else y + bias.to(y.dtype)
