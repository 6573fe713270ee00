"""What the CUDA ops of attention between whole rows still take from here."""

from torch import Tensor

from ..ops.attention import cuda_gat
from ._cuda import _pointer


def dropped(share: float, seed: Tensor | None) -> cuda_gat.Dropout:
    """Drop by the seed that lies on the device: a replayed CUDA graph reads another one."""
    return cuda_gat.dropout(share, seed_at=_pointer(seed)) if share else cuda_gat.Dropout()
