"""What a captured graph takes for constant: a call is refused once any of it has changed."""

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..errors import DeviceError, UnsupportedError
from .state import is_graph

#: Attributes that are numbers or text: a dropout's ``p``, and what users count.
PLAIN = bool | int | float | str
_GONE = object()


class Setting(NamedTuple):
    """A value of an optimizer's group, as a graph has it: a number, or the place of a tensor."""

    optimizer: Optimizer
    group: int
    key: str
    value: Any
    place: int | None  #: of a tensor on the device, which may be filled


class Settings:
    """The groups of optimizers, and the tensors of their state."""

    def __init__(self, optimizers: list[Optimizer], device: torch.device) -> None:
        self._optimizers, self._device = optimizers, device
        self._before = self._now()

    def _now(self) -> list[Setting]:
        return [
            Setting(one, at, key, *self._constant(key, value))
            for one in self._optimizers
            for at, group in enumerate(one.param_groups)
            for key, value in group.items()
            if key != "initial_lr"  # a scheduler's
        ]

    def _constant(self, key: str, value: Any) -> tuple[Any, int | None]:
        if key == "params":
            return len(value), None
        if not isinstance(value, Tensor):
            return value, None
        on_device = value.device == self._device
        return (None, value.data_ptr()) if on_device else (value.tolist(), None)

    def refuse(self, what: str) -> None:
        """Refuse what has changed since; ``what`` says who changed it."""
        found = self._now()
        if found == self._before:
            return
        for now, before in zip(found, self._before, strict=False):
            if now != before:
                raise UnsupportedError(f"{what.format(_told(now, before))}.")
        raise UnsupportedError("the groups of an optimizer have changed: capture again.")


def _told(now: Setting, before: Setting) -> str:
    """Say what has changed, and how to mend it."""
    name = f"{now.key} of {type(now.optimizer).__name__}"
    if before.place is not None:
        return f"{name}, where another one is now: fill the tensor, {now.key}.fill_(...)"
    tensor = "lr=torch.tensor(lr, device=...) and capturable=True (of SGD: fused=True)"
    mend = f"make it a tensor, {tensor}" if now.key == "lr" else "capture again"
    return (
        f"{name} from {before.value} to {now.value}, which the captured graph has as a number: "
        f"{mend}"
    )


class Guard:
    """The tensors, attributes and names that a step was captured with."""

    def __init__(self, state: Any, step: Callable[..., Any]) -> None:
        modules, optimizers = state.modules, state.held.optimizers
        self._places = [(n, t, t.data_ptr(), t.requires_grad) for n, t in state.tensors.values()]
        self._members = [
            (module, members, [*members.items()])
            for module in modules
            for members in (module._parameters, module._buffers)
            if members
        ]
        self._plain = [
            (module, vars(module), plain_attributes(module).items()) for module in modules
        ]
        self._states = [(one, one.state, _tensors_in(one.state)) for one in optimizers]
        self._settings = Settings(optimizers, state.device)
        self._edges = [(t, t._version) for t in state.held.tensors if is_graph(t)]
        self._names = [(name, read, read()) for name, read in names_of(step)]
        self._names = [one for one in self._names if _is_watched(one[2])]

    def check(self) -> None:
        """Refuse to replay where what the graph reads is no longer what the user holds."""
        for name, tensor, place, trained in self._places:
            if tensor.data_ptr() != place:
                raise DeviceError(f"{name} has moved since it was captured: capture again.")
            if tensor.requires_grad is not trained:
                raise UnsupportedError(
                    f"requires_grad of {name} is {tensor.requires_grad}, but was captured as "
                    f"{trained}: capture again."
                )
        for module, members, before in self._members:
            for name, one in before:
                if members.get(name) is not one:
                    raise UnsupportedError(
                        f"another tensor is in the place of {name} of a {type(module).__name__} "
                        f"than when it was captured: write into it, {name}.copy_(...), or capture "
                        "again."
                    )
        for module, attributes, plain in self._plain:
            if not plain <= attributes.items():
                self._refuse_attributes(module, attributes, dict(plain))
        for optimizer, held, tensors in self._states:
            if optimizer.state is not held or _tensors_in(held) != tensors:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} has another state than when it was captured: load "
                    "or clear it before capture, or capture again."
                )
        for edges, version in self._edges:
            if edges._version != version:
                raise UnsupportedError(
                    f"an edge_index of shape {tuple(edges.shape)} that step names has been written "
                    "to, and the captured graph reads what it was: capture again."
                )
        for name, read, before in self._names:
            self._refuse_name(name, read(), before)
        self._settings.refuse("since it was captured somebody changed {}")

    def _refuse_attributes(
        self, module: Module, now: Mapping[str, Any], before: Mapping[str, Any]
    ) -> None:
        kind = type(module).__name__
        if module.training is not before["training"]:
            ways = ("evaluation", "training")
            raise UnsupportedError(
                f"a {kind} is in {ways[module.training]}, but was captured in "
                f"{ways[before['training']]}: capture one function for each."
            )
        for name, one in before.items():
            if now.get(name, _GONE) != one:
                raise UnsupportedError(
                    f"{name} of a {kind} is {now.get(name)!r}, but was captured as {one!r}: "
                    "capture again."
                )

    def _refuse_name(self, name: str, now: Any, before: Any) -> None:
        same = now is before or (isinstance(before, PLAIN) and now == before)
        if not same:
            raise UnsupportedError(
                f"{name}, which step names, is another {type(before).__name__} than when it was "
                "captured: capture again, or give it as an input."
            )


def plain_attributes(one: object) -> dict[str, Any]:
    """Give the attributes that are numbers or text."""
    return {name: value for name, value in vars(one).items() if isinstance(value, PLAIN)}


def _tensors_in(state: Mapping[Any, Mapping[str, Any]]) -> list[int]:
    return [id(one) for held in state.values() for one in held.values()]


def _is_watched(value: Any) -> bool:
    """Tell whether a replay has the value itself, or what was computed of it."""
    return isinstance(value, PLAIN | Tensor | Module | Optimizer) or is_graph(value)


def names_of(step: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Give the variables of closures and the globals that a step's own code reads."""
    while isinstance(step, partial | MethodType):
        step = step.func if isinstance(step, partial) else step.__func__
    if not isinstance(step, FunctionType):
        return
    for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
        yield name, partial(_content, cell)
    for name in _globals_in(step):
        if name in step.__globals__:
            yield name, partial(step.__globals__.get, name)


def _globals_in(step: FunctionType) -> Iterable[str]:
    read = (one for one in dis.get_instructions(step) if one.opname == "LOAD_GLOBAL")
    return dict.fromkeys(str(one.argval) for one in read)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
