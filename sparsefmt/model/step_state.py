"""What a training step changes or takes for constant: put back, compared, and refused."""

import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, optim
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import DeviceError, UnsupportedError
from .state import Holdings, Randomness, cell_contents, is_graph

#: Attributes that are numbers or text: a dropout's ``p``, and what users count.
PLAIN = bool | int | float | str
#: Optimizers whose state before the first step is known: 0, but for these.
KNOWN = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
}
FIRST = {"mu_product": 1.0, "mu": 1.0, "eta": "lr", "step_size": "lr"}
_GONE = object()


class State:
    """The tensors, gradients, random numbers and attributes of a step, as they were."""

    def __init__(self, holdings: Holdings, device: torch.device) -> None:
        self.device, self.holdings = device, holdings
        self.modules = [m for module in holdings.modules for m in module.modules()]
        self.refuse()
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        names = set[str]()
        for name, t in self._named():
            if t.device == device and t.layout is torch.strided and not t.is_inference():
                name = name if name not in names else f"{name} ({len(names)})"
                names.add(self.tensors.setdefault(id(t), (name, t))[0])
        self.parameters = [
            (n, t) for n, t in self.tensors.values() if t.requires_grad and t.is_leaf
        ]
        #: Parameters without a state of their optimizer yet, with its group and their names.
        self.fresh = [
            (optimizer, group, p, self.tensors[id(p)][0])
            for optimizer in holdings.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if not optimizer.state.get(p) and id(p) in self.tensors
        ]
        self.made: list[dict[str, Any]] = []
        self._values = [t.detach().clone() for _, t in self.tensors.values()]
        of_optimizers = {
            id(value)
            for optimizer in holdings.optimizers
            for group in optimizer.param_groups
            for values in (group, *(optimizer.state.get(p, {}) for p in group["params"]))
            for value in (*values.values(), *group["params"])
            if isinstance(value, Tensor)
        }
        self.trained = {n for key, (n, _) in self.tensors.items() if key in of_optimizers}
        #: What a replay may write to; a norm's statistics count no version there.
        self._changing = of_optimizers | {
            id(t) for m in self.modules if isinstance(m, _NormBase) for t in m.buffers()
        }
        self._gradients = [
            (p, p.grad, None if p.grad is None else p.grad.detach().clone())
            for _, p in self.parameters
        ]
        on_host = [g for g in holdings.generators if g.device.type == "cpu"]
        self._randomness = Randomness([*self.generators(), *on_host])
        owners: list[Module | LRScheduler] = [*self.modules, *holdings.schedulers]
        self._attributes = [Attributes(owner) for owner in owners]
        self._settings = Settings(holdings.optimizers, device)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of modules, of optimizers and by themselves, with their names."""
        modules = self.holdings.modules
        kinds = [type(module).__name__ for module in modules]
        for number, (kind, module) in enumerate(zip(kinds, modules, strict=True)):
            same = kinds[:number].count(kind)
            first = f"{kind}{f' {same + 1}' if same else ''}." if len(kinds) > 1 else ""
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                yield first + name, tensor
        known = {id(p): n for module in modules for n, p in module.named_parameters()}
        for optimizer in self.holdings.optimizers:
            kind = type(optimizer).__name__
            for at, group in enumerate(optimizer.param_groups):
                for number, p in enumerate(group["params"]):
                    name = known.setdefault(id(p), f"parameter {number} of group {at} of {kind}")
                    yield name, p
                    for key, value in optimizer.state.get(p, {}).items():
                        if isinstance(value, Tensor):
                            yield f"{key} of {name}", value
                for key, value in group.items():
                    if isinstance(value, Tensor):
                        yield f"{key} of {kind}", value
        for number, tensor in enumerate(self.holdings.tensors):
            yield f"tensor {number} that step names, {tuple(tensor.shape)}", tensor

    def generators(self) -> list[torch.Generator]:
        """Return the generators of the device, torch's first."""
        if self.device.type == "cpu":
            return [torch.default_generator, *self.holdings.generators]
        torch.cuda.init()  # type: ignore[no-untyped-call]
        default = torch.cuda.default_generators[self.device.index or 0]
        theirs = [g for g in self.holdings.generators if g.device.type == "cuda"]
        return [default, *(g for g in theirs if g.device.index in (None, self.device.index))]

    # Undo

    def note_changes(self, receive: set[int]) -> None:
        """Add the tensors that a run has written to, by their values: ``.data`` has no version."""
        self._changing |= receive | {
            id(t)
            for (_, t), value in zip(self.tensors.values(), self._values, strict=True)
            if id(t) not in self._changing and not torch.equal(t, value)
        }

    def written(self) -> list[Tensor]:
        """Return the tensors that a replay may write to."""
        return [t for key, (_, t) in self.tensors.items() if key in self._changing]

    def restore(self, *, attributes: bool = True) -> None:
        """Put everything back; state that an optimizer has made is that before its first step.

        Without ``attributes`` those of modules stay as a run has left them.
        """
        with torch.no_grad():
            for (_, tensor), before in zip(self.tensors.values(), self._values, strict=True):
                if id(tensor) in self._changing:
                    tensor.copy_(before)
            for parameter, grad, copied in self._gradients:
                parameter.grad = grad
                if grad is not None and copied is not None:
                    grad.copy_(copied)
            for number, (optimizer, group, parameter, _) in enumerate(self.fresh):
                optimizer.state.pop(parameter, None)
                if self.made and self.made[number]:
                    optimizer.state[parameter] = self.made[number]
                    for key, value in self.made[number].items():
                        first: Any = FIRST.get(key, 0.0)
                        value.fill_(group["lr"] if first == "lr" else first)
        self._randomness.restore()
        if attributes:
            for owner in self._attributes:
                owner.restore()

    def keep_made(self) -> None:
        """Keep the state that optimizers have made in ``made``; refuse kinds that are not known."""
        made = [dict(optimizer.state.get(p, {})) for optimizer, _, p, _ in self.fresh]
        for (optimizer, group, _, name), values in zip(self.fresh, made, strict=True):
            kind = type(optimizer)
            known = kind in KNOWN and not (kind is optim.SGD and group["dampening"])
            if values and not known:
                why = " with dampening" if kind is optim.SGD else ""
                raise UnsupportedError(
                    f"what {kind.__name__}{why} holds of {name} before its first step is not "
                    "known: take one step before capture."
                )
            for key in [key for key, value in values.items() if value is None]:
                del values[key]
        self.made = made

    def observed(self) -> dict[str, Tensor]:
        """Copy what a run has left: tensors, optimizer state and gradients, by their names."""
        tensors = {name: t for name, t in self.tensors.values()}
        tensors |= {
            f"the gradient of {n}": p.grad for n, p in self.parameters if p.grad is not None
        }
        made = {
            f"{key} of {name}": value
            for optimizer, _, p, name in self.fresh
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }
        self.trained |= made.keys()
        return {name: t.detach().clone() for name, t in (tensors | made).items()}

    # Refuse

    def refuse(self) -> None:
        """Raise if the step holds what cannot be captured: GradScaler, DDP, lazy tensors, ..."""
        if self.holdings.scalers:
            raise UnsupportedError(
                "step holds a GradScaler, which looks at gradients on the CPU: use bfloat16 under "
                "torch.autocast, which needs none, or capture the forward alone."
            )
        for module in self.modules:
            if isinstance(module, DistributedDataParallel):
                raise UnsupportedError(
                    "step holds a DistributedDataParallel, whose exchange of gradients is not "
                    "captured: capture the step of the module inside of it, on one GPU."
                )
            members: Any = {**module._parameters, **module._buffers}
            for name, tensor in members.items():
                if is_lazy(tensor):
                    raise UnsupportedError(
                        f"{name} of a {type(module).__name__} has no shape yet: run step once "
                        "before capture."
                    )
        for optimizer in self.holdings.optimizers:
            if not all(group.get("capturable", True) for group in optimizer.param_groups):
                name = type(optimizer).__name__
                raise UnsupportedError(
                    f"{name} counts its steps on the CPU: make it with capturable=True, "
                    f"torch.optim.{name}(model.parameters(), capturable=True)."
                )
            optimizer._warned_capturable_if_run_uncaptured = True  # it warns of the runs before

    def refuse_changes(self) -> None:
        """Refuse what a run has changed that a replay would not."""
        for attributes in self._attributes:
            attributes.refuse_changes()
        self._settings.refuse("step changes {}")
        for optimizer in self.holdings.optimizers:
            for key, value in (pair for s in optimizer.state.values() for pair in s.items()):
                on_device = isinstance(value, Tensor) and value.device == self.device
                if value is not None and not on_device:
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} keeps {key} on the CPU, where a replay does "
                        "not change it: use SGD, or Adam(capturable=True)."
                    )
        if self.device.type != "cpu" and self._randomness.was_drawn_on_host():
            raise UnsupportedError(
                "step draws random numbers on the CPU, which a replay would not draw again: draw "
                "them on the GPU, torch.rand(..., device=x.device), or give them as an input."
            )


class Attributes:
    """The numbers, texts and tensors among the attributes of a module or a scheduler."""

    def __init__(self, owner: Module | LRScheduler) -> None:
        self._owner, self._now = owner, vars(owner)
        self._buffers = owner._buffers if isinstance(owner, Module) else {}
        self._before, self._buffers_before = dict(_restorable(self._now)), dict(self._buffers)

    def restore(self) -> None:
        """Put back attributes and buffers as they were; delete tensors that have been added."""
        pairs = (self._now, self._before), (self._buffers, self._buffers_before)
        for now, before in pairs:
            for name in [name for name, _ in _restorable(now) if name not in before]:
                if isinstance(now[name], Tensor):
                    del now[name]
            now.update(before)

    def refuse_changes(self) -> None:
        """Raise if the step replaced a buffer, or a number, text or tensor among the attributes."""
        kind = type(self._owner).__name__
        for name, before in self._before.items():
            now = self._now.get(name, _GONE)
            if before is None or _is_same(now, before):
                continue
            if not isinstance(self._owner, Module):
                raise UnsupportedError(
                    f"step calls {kind}.step(), which counts on the CPU: call it after step, with "
                    "lr=torch.tensor(lr, device=...) in the optimizer."
                )
            if isinstance(before, Tensor):
                self._refuse_tensor(f"{name} of a {kind}", name, ", or set it to None before")
            raise UnsupportedError(
                f"step changes {name} of a {kind} from {before!r} to {now!r}, which a replay would "
                f"not: count in a buffer on the GPU, self.{name}.add_(1), or outside of step. What "
                "is set once is set before: run step before capture."
            )
        for name, before in self._buffers_before.items():
            if self._buffers.get(name) is not before:
                self._refuse_tensor(f"the buffer {name} of a {kind}", name, "")

    def _refuse_tensor(self, what: str, name: str, else_: str) -> None:
        raise UnsupportedError(
            f"step puts another tensor in the place of {what}: write into it, "
            f"{name}.copy_(...){else_}."
        )


def _restorable(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((k, v) for k, v in values.items() if isinstance(v, PLAIN | Tensor | None))


def _is_same(now: object, before: object) -> bool:
    return now is before or (isinstance(before, PLAIN) and bool(now == before))


#: An optimizer, its group and key, and the value that a graph has: a number, or a tensor's place.
Setting: TypeAlias = tuple[Optimizer, int, str, Any, int | None]


class Settings:
    """The groups of optimizers, and the tensors of their state."""

    def __init__(self, optimizers: list[Optimizer], device: torch.device) -> None:
        self._optimizers, self._device = optimizers, device
        self._before = self._now()

    def _now(self) -> list[Setting]:
        return [
            (optimizer, at, key, *self._constant(key, value))
            for optimizer in self._optimizers
            for at, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "initial_lr"  # a scheduler's
        ]

    def _constant(self, key: str, value: object) -> tuple[Any, int | None]:
        if isinstance(value, list) and key == "params":
            return len(value), None
        if not isinstance(value, Tensor):
            return value, None
        on_device = value.device == self._device
        return (None, value.data_ptr()) if on_device else (value.tolist(), None)

    def refuse(self, what: str) -> None:
        """Raise if a setting differs from the first; ``what`` is a template for the error."""
        settings = self._now()
        if settings == self._before:
            return
        for now, before in zip(settings, self._before, strict=False):
            if now != before:
                raise UnsupportedError(f"{what.format(_change(now, before))}.")
        raise UnsupportedError("the groups of an optimizer have changed: capture again.")


def _change(now: Setting, before: Setting) -> str:
    """Describe how a setting of an optimizer has changed, and how to mend it."""
    optimizer, _, key, value, _ = now
    name = f"{key} of {type(optimizer).__name__}"
    if before[4] is not None:
        return f"{name}, where another one is now: fill the tensor, {key}.fill_(...)"
    tensor = "lr=torch.tensor(lr, device=...) and capturable=True (of SGD: fused=True)"
    mend = f"make it a tensor, {tensor}" if key == "lr" else "capture again"
    return f"{name} from {before[3]} to {value}, which the captured graph has as a number: {mend}"


class Guard:
    """The tensors, attributes and names that a step was captured with."""

    def __init__(self, state: State, step: Callable[..., Any]) -> None:
        modules, optimizers = state.modules, state.holdings.optimizers
        self._places = [(n, t, t.data_ptr(), t.requires_grad) for n, t in state.tensors.values()]
        self._members = [
            (module, members, [*members.items()])
            for module in modules
            for members in (module._parameters, module._buffers)
            if members
        ]
        self._plain = [
            (m, vars(m), {k: v for k, v in vars(m).items() if isinstance(v, PLAIN)}.items())
            for m in modules
        ]
        self._states = [(o, o.state, _tensors_in(o.state)) for o in optimizers]
        self._settings = Settings(optimizers, state.device)
        self._edges = [(t, t._version) for t in state.holdings.tensors if is_graph(t)]
        #: What a replay has itself, or what was computed of it.
        self._names = [
            (name, read, value)
            for name, read in _names_of(step)
            if isinstance(value := read(), PLAIN | Tensor | Module | Optimizer) or is_graph(value)
        ]

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
            for name, member in before:
                if members.get(name) is not member:
                    raise UnsupportedError(
                        f"another tensor is in the place of {name} of a {type(module).__name__} "
                        f"than when it was captured: write into it, {name}.copy_(...), or capture "
                        "again."
                    )
        for module, attributes, plain in self._plain:
            if not plain <= attributes.items():
                self._refuse_attributes(module, attributes, dict(plain))
        for optimizer, state, tensors in self._states:
            if optimizer.state is not state or _tensors_in(state) != tensors:
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
        for name, read, value in self._names:
            if not _is_same(read(), value):
                raise UnsupportedError(
                    f"{name}, which step names, is another {type(value).__name__} than when it was "
                    "captured: capture again, or give it as an input."
                )
        self._settings.refuse("since it was captured somebody changed {}")

    def _refuse_attributes(
        self, module: Module, now: Mapping[str, Any], before: Mapping[str, Any]
    ) -> None:
        kind = type(module).__name__
        if module.training is not before["training"]:
            modes = ("evaluation", "training")
            raise UnsupportedError(
                f"a {kind} is in {modes[module.training]}, but was captured in "
                f"{modes[before['training']]}: capture one function for each."
            )
        for name, value in before.items():
            if now.get(name, _GONE) != value:
                raise UnsupportedError(
                    f"{name} of a {kind} is {now.get(name)!r}, but was captured as {value!r}: "
                    "capture again."
                )


def _tensors_in(state: Mapping[Any, Mapping[str, Any]]) -> list[int]:
    return [id(value) for values in state.values() for value in values.values()]


def _names_of(step: object) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the variables of closures and the globals that a step's code reads, and how."""
    while isinstance(step, partial | MethodType):
        step = step.func if isinstance(step, partial) else step.__func__
    if not isinstance(step, FunctionType):
        return
    for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
        yield name, partial(cell_contents, cell)
    loads = (load for load in dis.get_instructions(step) if load.opname == "LOAD_GLOBAL")
    for name in dict.fromkeys(str(load.argval) for load in loads):
        if name in step.__globals__:
            yield name, partial(step.__globals__.get, name)
