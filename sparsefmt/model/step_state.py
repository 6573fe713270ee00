"""What a step changes, so that runs of it can be undone, compared, and refused."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..errors import UnsupportedError
from .guard import PLAIN, Settings

#: Optimizers whose state before the first step is known: 0, but for these.
KNOWN = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
}
FIRST = {"mu_product": 1.0, "mu": 1.0, "eta": "lr", "step_size": "lr"}
_GONE = object()


class State:
    """The tensors, gradients, random numbers and attributes of a step, as they were."""

    def __init__(self, held: Any, device: torch.device) -> None:
        self.device, self.held = device, held
        self.modules = [m for one in held.modules for m in one.modules()]
        self.refuse()
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        taken = set[str]()
        for name, t in self._named():
            if t.device == device and t.layout is torch.strided and not t.is_inference():
                name = name if name not in taken else f"{name} ({len(taken)})"
                taken.add(self.tensors.setdefault(id(t), (name, t))[0])
        self.parameters = [
            (n, t) for n, t in self.tensors.values() if t.requires_grad and t.is_leaf
        ]
        #: Parameters without a state of their optimizer yet, with its group and their names.
        self.fresh = [
            (optimizer, group, p, self.tensors[id(p)][0])
            for optimizer in held.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if not optimizer.state.get(p) and id(p) in self.tensors
        ]
        self.made: list[dict[str, Any]] = []
        self._values = [t.detach().clone() for _, t in self.tensors.values()]
        of_optimizers = {id(t) for t in self._of_optimizers()}
        self.trained = {n for at, (n, _) in self.tensors.items() if at in of_optimizers}
        #: What a replay may write to; a norm's statistics count no version there.
        self.changing = of_optimizers | {
            id(t) for m in self.modules if isinstance(m, _NormBase) for t in m.buffers()
        }
        self._given = [(p, p.grad, _cloned(p.grad)) for _, p in self.parameters]
        self._drawn = [(g, g.get_state()) for g in self.generators()]
        self._host = [g for g in held.generators if g.device.type == "cpu" != device.type]
        self._on_host = _on_host(self._host)
        self._attributes = [Attributes(one) for one in (*self.modules, *held.schedulers)]
        self._settings = Settings(held.optimizers, device)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        kinds = [type(module).__name__ for module in self.held.modules]
        for number, (kind, module) in enumerate(zip(kinds, self.held.modules, strict=True)):
            same = kinds[:number].count(kind)
            first = f"{kind}{f' {same + 1}' if same else ''}." if len(kinds) > 1 else ""
            for name, one in (*module.named_parameters(), *module.named_buffers()):
                yield first + name, one
        known = {id(p): n for m in self.held.modules for n, p in m.named_parameters()}
        for optimizer in self.held.optimizers:
            kind = type(optimizer).__name__
            for at, group in enumerate(optimizer.param_groups):
                for number, p in enumerate(group["params"]):
                    name = known.setdefault(id(p), f"parameter {number} of group {at} of {kind}")
                    yield name, p
                    for key, one in optimizer.state.get(p, {}).items():
                        if isinstance(one, Tensor):
                            yield f"{key} of {name}", one
                for key, one in group.items():
                    if isinstance(one, Tensor):
                        yield f"{key} of {kind}", one
        for number, one in enumerate(self.held.tensors):
            yield f"tensor {number} that step names, {tuple(one.shape)}", one

    def _of_optimizers(self) -> Iterator[Tensor]:
        for optimizer in self.held.optimizers:
            for group in optimizer.param_groups:
                held = [*group.values(), *group["params"]]
                held += [v for p in group["params"] for v in optimizer.state.get(p, {}).values()]
                yield from (one for one in held if isinstance(one, Tensor))

    def generators(self) -> list[torch.Generator]:
        """Give the generators of the device, torch's first."""
        if self.device.type == "cpu":
            return [torch.default_generator, *self.held.generators]
        torch.cuda.init()  # type: ignore[no-untyped-call]
        own = torch.cuda.default_generators[self.device.index or 0]
        theirs = [g for g in self.held.generators if g.device.type == "cuda"]
        return [own, *(g for g in theirs if g.device.index in (None, self.device.index))]

    # Undo

    def note_changes(self, receive: set[int]) -> None:
        """Note which tensors a run has written to, by their values: ``.data`` counts no version."""
        self.changing |= receive | {
            id(t)
            for (_, t), value in zip(self.tensors.values(), self._values, strict=True)
            if id(t) not in self.changing and not torch.equal(t, value)
        }

    def written(self) -> list[Tensor]:
        """Give the tensors that a replay may write to."""
        return [t for at, (_, t) in self.tensors.items() if at in self.changing]

    def restore(self, *, attributes: bool = True) -> None:
        """Put everything back; state that an optimizer has made is that before its first step.

        Without ``attributes`` those of modules stay as a run has left them.
        """
        with torch.no_grad():
            for (_, tensor), value in zip(self.tensors.values(), self._values, strict=True):
                if id(tensor) in self.changing:
                    tensor.copy_(value)
            for parameter, grad, value in self._given:
                parameter.grad = grad
                if grad is not None:
                    grad.copy_(value)
            for number, (optimizer, group, parameter, _) in enumerate(self.fresh):
                optimizer.state.pop(parameter, None)
                if self.made and self.made[number]:
                    optimizer.state[parameter] = self.made[number]
                    for key, one in self.made[number].items():
                        first: Any = FIRST.get(key, 0.0)
                        one.fill_(group["lr"] if first == "lr" else first)
        for generator, drawn in self._drawn:
            generator.set_state(drawn)
        torch.set_rng_state(self._on_host[0])
        random.setstate(self._on_host[1])
        np.random.set_state(self._on_host[2])  # noqa: NPY002
        for generator, drawn in zip(self._host, self._on_host[3:], strict=True):
            generator.set_state(drawn)
        if attributes:
            for one in self._attributes:
                one.restore()

    def keep_made(self) -> None:
        """Take the state that optimizers have made for that which a graph writes to."""
        made = [dict(optimizer.state.get(p, {})) for optimizer, _, p, _ in self.fresh]
        for (optimizer, group, _, name), found in zip(self.fresh, made, strict=True):
            kind = type(optimizer)
            known = kind in KNOWN and not (kind is optim.SGD and group["dampening"])
            if found and not known:
                why = " with dampening" if kind is optim.SGD else ""
                raise UnsupportedError(
                    f"what {kind.__name__}{why} holds of {name} before its first step is not "
                    "known: take one step before capture."
                )
            for key in [key for key, one in found.items() if one is None]:
                del found[key]
        self.made = made

    def observed(self) -> dict[str, Tensor]:
        """Copy what a run has left: tensors, optimizer state and gradients, by their names."""
        found = {name: t for name, t in self.tensors.values()}
        found |= {f"the gradient of {n}": p.grad for n, p in self.parameters if p.grad is not None}
        made = {
            f"{key} of {name}": one
            for optimizer, _, p, name in self.fresh
            for key, one in optimizer.state.get(p, {}).items()
            if isinstance(one, Tensor)
        }
        self.trained |= made.keys()
        return {name: t.detach().clone() for name, t in (found | made).items()}

    # Refuse

    def refuse(self) -> None:
        """Refuse what no graph can do, before anything runs."""
        if self.held.scalers:
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
            for name, one in (*module._parameters.items(), *module._buffers.items()):
                if is_lazy(one):
                    raise UnsupportedError(
                        f"{name} of a {type(module).__name__} has no shape yet: run step once "
                        "before capture."
                    )
        for optimizer in self.held.optimizers:
            if not all(group.get("capturable", True) for group in optimizer.param_groups):
                name = type(optimizer).__name__
                raise UnsupportedError(
                    f"{name} counts its steps on the CPU: make it with capturable=True, "
                    f"torch.optim.{name}(model.parameters(), capturable=True)."
                )
            optimizer._warned_capturable_if_run_uncaptured = True  # it warns of the runs before

    def refuse_changes(self) -> None:
        """Refuse what a run has changed that a replay would not."""
        for one in self._attributes:
            one.refuse_changes()
        self._settings.refuse("step changes {}")
        for optimizer in self.held.optimizers:
            for key, held in (pair for each in optimizer.state.values() for pair in each.items()):
                if held is not None and not (
                    isinstance(held, Tensor) and held.device == self.device
                ):
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} keeps {key} on the CPU, where a replay does "
                        "not change it: use SGD, or Adam(capturable=True)."
                    )
        if self.device.type != "cpu" and not _same_on_host(self._on_host, _on_host(self._host)):
            raise UnsupportedError(
                "step draws random numbers on the CPU, which a replay would not draw again: draw "
                "them on the GPU, torch.rand(..., device=x.device), or give them as an input."
            )


class Attributes:
    """The numbers, texts and tensors among the attributes of a module or a scheduler."""

    def __init__(self, owner: Any) -> None:
        self.owner, self._own = owner, vars(owner)
        self._buffers = owner._buffers if isinstance(owner, Module) else {}
        self._before, self._buffers_before = dict(_restorable(self._own)), dict(self._buffers)

    def restore(self) -> None:
        """Put back what there was, and take away tensors that there were not."""
        pairs = (self._own, self._before), (self._buffers, self._buffers_before)
        for held, before in pairs:
            for name in [name for name, _ in _restorable(held) if name not in before]:
                if isinstance(held[name], Tensor):
                    del held[name]
            held.update(before)

    def refuse_changes(self) -> None:
        """Refuse another number or tensor than there was; what was None may be anything."""
        kind = type(self.owner).__name__
        for name, one in self._before.items():
            now = self._own.get(name, _GONE)
            if now is one or one is None or (isinstance(one, PLAIN) and now == one):
                continue
            if not isinstance(self.owner, Module):
                raise UnsupportedError(
                    f"step calls {kind}.step(), which counts on the CPU: call it after step, with "
                    "lr=torch.tensor(lr, device=...) in the optimizer."
                )
            if isinstance(one, Tensor):
                self._refuse_tensor(f"{name} of a {kind}", name, ", or set it to None before")
            raise UnsupportedError(
                f"step changes {name} of a {kind} from {one!r} to {now!r}, which a replay would "
                f"not: count in a buffer on the GPU, self.{name}.add_(1), or outside of step. What "
                "is set once is set before: run step before capture."
            )
        for name, one in self._buffers_before.items():
            if self._buffers.get(name) is not one:
                self._refuse_tensor(f"the buffer {name} of a {kind}", name, "")

    def _refuse_tensor(self, what: str, name: str, else_: str) -> None:
        raise UnsupportedError(
            f"step puts another tensor in the place of {what}: write into it, "
            f"{name}.copy_(...){else_}."
        )


def _restorable(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((k, v) for k, v in held.items() if isinstance(v, PLAIN | Tensor | None))


def _cloned(value: Tensor | None) -> Any:
    return None if value is None else value.detach().clone()


def _on_host(generators: list[torch.Generator]) -> tuple[Any, ...]:
    numpy = np.random.get_state()  # noqa: NPY002
    states = [one.get_state() for one in generators]
    return torch.get_rng_state(), random.getstate(), numpy, *states


def _same_on_host(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    tensors = zip((one[0], *one[3:]), (other[0], *other[3:]), strict=True)
    numpy = np.array_equal(one[2][1], other[2][1]) and one[2][2:] == other[2][2:]
    return numpy and one[1] == other[1] and all(torch.equal(a, b) for a, b in tensors)
