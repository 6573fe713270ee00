"""Which calls autograd records, and refusals of those that it cannot record."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import Function, forward_ad

from ...errors import UnsupportedError

T = TypeVar("T")
#: The context of a Function, which keeps what it likes on it.
Ctx: TypeAlias = Any
#: Makes of a function one that torch.compile does not trace.  Torch's own way to do so imports its
#: compiler where that function is called, not here, which takes 0.7 s: call it in traced code only.
untraced: Any = getattr(torch._compile, "_disable_dynamo", None) or torch.compiler.disable
_unpack_dual: Any = forward_ad.unpack_dual

# torch.compile shows the line that raises, not the text of the error: so the name says it.
_NEITHER_TORCH_FUNC_NOR_FORWARD_MODE = (
    "forward-mode derivatives (forward_ad) and transforms of torch.func (grad, vjp, jvp, vmap) "
    "cannot pass through sparsefmt.autograd: use torch.autograd.grad for gradients, "
    "torch.autograd.functional.jvp for directional derivatives, and a loop in place of vmap."
)

_NOT_AGAIN = (
    "the gradient of {name} cannot be differentiated again: do without create_graph=True, or "
    "{instead}."
)


def recorded(*tensors: Tensor | None) -> bool:
    """Return True if autograd records these tensors; else a library op alone will do.

    A library op would drop the tangents of forward mode and what torch.func follows: refused here.
    """
    traced = torch.compiler.is_dynamo_compiling()
    if traced or forward_ad._current_level >= 0 or maybe_current_level() is not None:
        refuse_transforms(*tensors)
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def apart(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors, views where torch.compile traces: a Function takes none twice there."""
    if not torch.compiler.is_compiling():
        return tensors
    return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors)


def taped(
    function: type[Function],
    compute: Callable[..., T],
    inputs: tuple[Tensor | None, ...],
    *constants: Any,
) -> T:
    """Run ``compute(*inputs, *constants)``, as a Function if autograd records the inputs."""
    if not recorded(*inputs):
        return compute(*inputs, *constants)
    if torch.compiler.is_compiling():
        inputs = apart(*inputs)
    return function.apply(*inputs, *constants)  # type: ignore[no-untyped-call, no-any-return]


def once_differentiable(
    name: str,
    compute: Any,
    *args: Any,
    instead: str = "compose sddmm, edge_softmax and spmm, whose gradients can be",
    refusal: str = _NOT_AGAIN,
) -> Any:
    """Compute a gradient of the function of that name, which can be used but not differentiated."""
    refuse_transforms(*args)
    if not torch.is_grad_enabled():
        return compute(*args)
    return _Once.apply(refusal, name, instead, compute, *args)  # type: ignore[no-untyped-call]


class _Once(Function):
    @staticmethod
    def forward(ctx: Ctx, refusal: str, name: str, instead: str, compute: Any, *args: Any) -> Any:
        ctx.refusal, ctx.name, ctx.instead = refusal, name, instead
        return compute(*args)

    @staticmethod
    def backward(ctx: Ctx, *grads: Any) -> Any:
        raise UnsupportedError(ctx.refusal.format(name=ctx.name, instead=ctx.instead))


def _transform() -> int | None:
    """Return the level of torch.func while torch.compile traces: run then, not traced."""
    level: int | None = maybe_current_level()
    return level


_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_transforms(*args: Any) -> None:
    """Raise within torch.func, and for a tensor with a tangent, which no tracer can see."""
    # Traced, a level that the traced code has entered would look like a constant.
    traced = torch.compiler.is_dynamo_compiling()
    level = _transform if traced else maybe_current_level
    if forward_ad._current_level < 0 and level() is None:
        return
    refused = traced or maybe_current_level() is not None
    for arg in args:  # a sparse one has none, and no memory to ask about
        dense = isinstance(arg, Tensor) and arg.layout is torch.strided
        if refused or (dense and _unpack_dual(arg).tangent is not None):
            raise UnsupportedError(_NEITHER_TORCH_FUNC_NOR_FORWARD_MODE)
