"""Tiles for the products of a graph on a GPU, by torch's own rule of what float32 may become."""

from typing import Any

import torch
from torch import Tensor

from ...formats.base import Built
from ...formats.sgt import SGT
from ...interop.torch import to_tensor
from ...ops.tiles.costs import Costs
from ...ops.tiles.kernels import against_device, against_height
from ...ops.tiles.operands import Operands, PreparedTiles
from .precision import tf32_is_allowed


class _Prepared(PreparedTiles):
    def build(self, costs: Costs) -> Operands | None:
        with torch.inference_mode(False):  # tensors born there could never take part in training
            return super().build(costs)


def prepare_tiles(
    built: Built, tiles: SGT, inverse_degree: Tensor, costs: Costs | None = None
) -> None:
    """Put ``tiles``, if they fit, in the place of earlier ones for products with a structure."""
    device = inverse_degree.get_device()
    fit = tiles.nnz and not (against_device(device) or against_height(tiles))
    with built.lock:
        before = built.found.get("tiles")
        if before is not None and before.sgt is tiles and before.costs == costs:
            return
        built.found.pop("tiles", None)
        if fit:
            options: Any = {"view": to_tensor, "refuses_float32": against_float32}
            built.found["tiles"] = _Prepared(tiles, inverse_degree, costs=costs, **options)
        if before is not None:
            torch.cuda.synchronize(device)  # synchronize! what it has composed may go


def drop_tiles(built: Built, device: torch.device) -> None:
    """Let products with a structure go without tiles again."""
    with built.lock:
        if built.found.pop("tiles", None) is not None:
            torch.cuda.synchronize(device)  # synchronize! what it has composed may go


def against_float32() -> list[str]:
    """List the reasons why tiles do not take float32 now."""
    mend = 'torch.set_float32_matmul_precision("high")'
    return [] if tf32_is_allowed() else [f"tensor cores round float32: allow it with {mend}"]
