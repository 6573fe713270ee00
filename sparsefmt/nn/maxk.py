"""MaxK, the non-linearity of MaxK-GNN."""

from torch import Tensor
from torch.nn import Module

from ..autograd import maxk
from ..autograd.cbsr import features_to_keep


class MaxK(Module):
    """Keep the ``k`` largest features of each row: a non-linearity, in the place of ReLU.

    ``y[i, f] = x[i, f]`` for the ``k`` largest of row ``i``, and 0 elsewhere: ``autograd.maxk``.
    Before an aggregation use the layer's own ``k``, which spares the dense result.

    Parameters
    ----------
    k : int
        Between 1 and the number of features, which is known when it is called.

    Raises
    ------
    DtypeError, ShapeError
        If ``k`` is no integer, or less than 1.

    Notes
    -----
    MaxK-GNN (ASPLOS'24), section 3.1.
    """

    __module__ = "sparsefmt.nn"

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = features_to_keep(k)

    def extra_repr(self) -> str:
        """Return what the ``repr`` shows."""
        return f"k={self.k}"

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, feat) to (n, feat)."""
        return maxk(x, self.k)
