"""What the convolutions share: MaxK's ``k``, samples of the rows, the bias."""

from typing import Any

from torch import Tensor
from torch.nn import Module

from ..autograd import (
    GraphLike,
    checked_strategy,
    features_to_keep,
    sample_width,
    sampled_aggregate,
)
from ..errors import UnsupportedError
from ._checks import check_counts


class Balanced(Module):
    """A module that keeps ``k`` features of each row, or all of them where it is None."""

    def __init__(self, k: int | None, feat: int | None = None) -> None:
        super().__init__()
        self.k = None if k is None else features_to_keep(k, feat)

    def extra_repr(self) -> str:
        """What the ``repr`` shows."""
        return f"k={self.k}"


class Convolution(Balanced):
    """A layer that goes over a sample of each row where ``_width()`` tells how many entries."""

    def __init__(
        self,
        k: int | None,
        sample: int | None,
        training_sample: int | None,
        strategy: str,
        feat: int | None = None,
    ) -> None:
        super().__init__(k, feat)
        self.sample = _sample_width("sample", sample, self.k)
        self.training_sample = _sample_width("training_sample", training_sample, self.k)
        self.strategy = checked_strategy(strategy)

    def extra_repr(self) -> str:
        """What the ``repr`` shows."""
        widths = {"sample": self.sample, "training_sample": self.training_sample}
        given = [f"{name}={width}" for name, width in widths.items() if width is not None]
        if self.sample is not None:
            given.append(f"strategy={self.strategy!r}")
        return ", ".join([super().extra_repr(), *given])

    def _width(self) -> int | None:
        """Tell how many entries of each row to go over now; None for all."""
        if self.training:
            return _sample_width("training_sample", self.training_sample, self.k)
        return _sample_width("sample", self.sample, self.k)

    def _is_whole(self) -> bool:
        """Tell whether all features of all entries count."""
        return self._width() is None and self.k is None

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


class LinearConvolution(Convolution):
    """A convolution with linear maps of its own."""

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        bias: bool = True,
        k: int | None = None,
        sample: int | None = None,
        training_sample: int | None = None,
        strategy: str = "fastrand",
    ) -> None:
        check_counts(out_channels=out_channels)
        self._check_channels(in_channels)
        super().__init__(k, sample, training_sample, strategy, out_channels)
        self._add_parameters(in_channels, out_channels, bias)

    def _check_channels(self, in_channels: Any) -> None:
        """Check the features that the layer takes."""
        check_counts(in_channels=in_channels)

    def _add_parameters(self, in_channels: Any, out_channels: int, bias: bool) -> None:
        """Make the layer's linear maps, and draw their parameters."""
        raise NotImplementedError


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
