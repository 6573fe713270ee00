"""Whether two runs of a step have left the same: up to rounding, and to what atomics do."""

import torch
from torch import Tensor

#: Largest difference between a replay and a step, in the largest number of a tensor's kind.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
COARSE = 2e-2  # of floats of two bytes


def difference(
    found: dict[str, Tensor], expected: dict[str, Tensor], again: dict[str, Tensor]
) -> str:
    """Name the first tensor that differs by more than rounding, and by how much; else empty.

    Steps that add up by atomics differ from one run to the ``again``: what these two do, others
    may, and some more.
    """
    kinds: dict[str, float] = {}
    for name, one in expected.items():
        kinds[_kind(name)] = max(kinds.get(_kind(name), 0.0), _largest(one))
    for name, one in expected.items():
        other = found.get(name)
        if other is None:
            return f"{name} is missing"
        same = (one == other) | ((one != one) & (other != other))
        if same.all():
            continue
        allowed = 0.0
        if one.is_floating_point():
            noise = _largest(one.double() - again[name].double())
            allowed = TOLERANCE.get(one.dtype, COARSE) * kinds[_kind(name)] + 8 * noise
        apart = (one.double() - other.double()).masked_fill(same, 0).abs()
        if not (apart <= allowed).all():
            size = f"{float(apart.max()):.1e}, where it is {_largest(one):.1e} at most"
            return f"{name} differs by {size}"
    return ""


def unsteady(one: dict[str, Tensor], other: dict[str, Tensor], trained: set[str]) -> str:
    """Name a tensor that differs between two runs by more than atomics can; else empty.

    Those ``trained`` are left out: an optimizer makes a whole step of the sign of a small gradient.
    """
    for name in one:
        apart = _largest(one[name].double() - other[name].double())
        if name not in trained and apart > COARSE * _largest(one[name]):
            return f"{name} differs by {apart:.1e}, where it is {_largest(one[name]):.1e} at most"
    return ""


def _kind(name: str) -> str:
    """What has one scale: one state of all parameters, their gradients, or a tensor by itself."""
    return name.partition(" of ")[0] if " of " in name else name


def _largest(values: Tensor) -> float:
    return float(values.double().nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0
