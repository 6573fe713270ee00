"""What a step changes, so that runs of it can be undone, compared, and followed by replays."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, optim
from torch.nn.modules.batchnorm import _NormBase

from ..errors import DeviceError, UnsupportedError

#: Optimizers whose state before the first step is known: 0, but for these.
KNOWN = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
}
FIRST = {"mu_product": 1.0, "mu": 1.0, "eta": "lr", "step_size": "lr"}
#: Largest difference between a replay and a step, in the largest number of a tensor's kind.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
COARSE = 2e-2  # of floats of two bytes


class Gradient(NamedTuple):
    """A parameter's gradient in a graph: what it adds to, if to any, and what it ends as."""

    of: Tensor
    start: Tensor | None
    end: Tensor | None


class State:
    """The tensors, gradients, random numbers and settings of a step, as they were."""

    def __init__(self, held: Any, device: torch.device) -> None:
        self.device, self.held = device, held
        self.modules = [m for one in held.modules for m in one.modules()]
        self.tensors = {
            id(t): (name, t)
            for name, t in self._named()
            if t.device == device and t.layout is torch.strided and not t.is_inference()
        }
        self.parameters = [
            (n, t) for n, t in self.tensors.values() if t.requires_grad and t.is_leaf
        ]
        #: What optimizers have no state of yet, with a name.
        self.fresh = [
            (optimizer, group, p, self.tensors[id(p)][0])
            for optimizer in held.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if not optimizer.state.get(p) and id(p) in self.tensors
        ]
        self.made: list[dict[str, Any]] = []
        self.gradients: list[Gradient] = []
        self._values = [t.detach().clone() for _, t in self.tensors.values()]
        #: Whose changes count no version, or none in a replay; others are put back where they do.
        self.changing = {id(t) for t in self._of_optimizers()} | {
            id(t) for m in self.modules if isinstance(m, _NormBase) for t in m.buffers()
        }
        self._versions = [t._version for _, t in self.tensors.values()]
        self._given = [(p, p.grad, _cloned(p.grad)) for _, p in self.parameters]
        self._drawn = [(g, g.get_state()) for g in self.generators()]
        self._host = [g for g in held.generators if g.device.type == "cpu" != device.type]
        self._on_host = _on_host(self._host)
        self._plain = [(vars(m), dict(_plain(m))) for m in (*self.modules, *held.schedulers)]
        self._buffers = [(m, dict(m._buffers)) for m in self.modules]
        self._trained = [(m, m.training) for m in self.modules]
        self._settings = self.settings()
        self._places = [(n, t, t.data_ptr()) for n, t in self.tensors.values()]
        self._states = [(one, one.state) for one in held.optimizers]

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        several = len(self.held.modules) > 1
        for module in self.held.modules:
            first = f"{type(module).__name__}." if several else ""
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

    def note_changes(self, receive: set[int]) -> None:
        """Note which tensors a run has written to."""
        self.changing |= receive | {
            id(t)
            for (_, t), version in zip(self.tensors.values(), self._versions, strict=True)
            if t._version != version
        }

    def written(self) -> list[Tensor]:
        """Give the tensors that a replay may write to."""
        return [t for at, (_, t) in self.tensors.items() if at in self.changing]

    def generators(self) -> list[torch.Generator]:
        """Give the generators of the device, torch's first."""
        if self.device.type == "cpu":
            return [torch.default_generator, *self.held.generators]
        torch.cuda.init()  # type: ignore[no-untyped-call]
        own = torch.cuda.default_generators[self.device.index or 0]
        theirs = [g for g in self.held.generators if g.device.type == "cuda"]
        return [own, *(g for g in theirs if g.device.index in (None, self.device.index))]

    def settings(self) -> list[Any]:
        """Give what a graph takes for constant of optimizers: numbers, and places of tensors."""
        return [
            (one, at, key, self._constant(value) if key != "params" else len(value))
            for one in self.held.optimizers
            for at, group in enumerate(one.param_groups)
            for key, value in group.items()
            if key != "initial_lr"  # a scheduler's
        ]

    def _constant(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.data_ptr() if value.device == self.device else value.tolist()

    def restore(self) -> None:
        """Put everything back; state that an optimizer has made is that before its first step."""
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
        for held, before in self._plain:
            held.update(before)

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

    def start_gradients(self, receive: set[int]) -> None:
        """Give zeros to the parameters without a gradient that backward adds to."""
        for _, parameter in self.parameters:
            if id(parameter) in receive and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def end_gradients(self, starts: list[tuple[Tensor | None, int]]) -> None:
        """Note what a recorded run has made of the gradients that it found."""
        self.gradients = []
        for (_, p), (start, version) in zip(self.parameters, starts, strict=True):
            read = start is not None and (p.grad is start or start._version != version)
            if read or p.grad is not None:
                self.gradients.append(Gradient(p, start if read else None, p.grad))

    def gradients_in(self) -> None:
        """Put the gradients that there are where a replay adds to them."""
        for one in self.gradients:
            if one.start is not None and one.of.grad is not one.start:
                with torch.no_grad():
                    one.start.zero_() if one.of.grad is None else one.start.copy_(one.of.grad)
                one.of.grad = one.start

    def gradients_out(self) -> None:
        """Show the gradients that a replay has left."""
        for one in self.gradients:
            if one.of.grad is not one.end:
                one.of.grad = one.end

    def refuse(self) -> None:
        """Refuse what no graph can do, before anything runs."""
        if self.held.scalers:
            raise UnsupportedError(
                "step holds a GradScaler, which looks at gradients on the CPU: use bfloat16 under "
                "torch.autocast, which needs none, or capture the forward alone."
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
        for scheduler, (_, before) in zip(
            self.held.schedulers, self._plain[len(self.modules) :], strict=True
        ):
            if scheduler.last_epoch != before["last_epoch"]:
                raise UnsupportedError(
                    f"step calls {type(scheduler).__name__}.step(), which counts on the CPU: call "
                    "it after step, with lr=torch.tensor(lr, device=...) in the optimizer."
                )
        for module, before in self._buffers:
            for name, buffer in before.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                    raise UnsupportedError(
                        f"step puts another tensor in the place of the buffer {name} of a "
                        f"{type(module).__name__}: write into it, {name}.copy_(...)."
                    )
        self._refuse_settings("step changes {}")
        for optimizer in self.held.optimizers:
            for key, one in (pair for held in optimizer.state.values() for pair in held.items()):
                if one is not None and not (isinstance(one, Tensor) and one.device == self.device):
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} keeps {key} on the CPU, where a replay does "
                        "not change it: use SGD, or Adam(capturable=True)."
                    )
        if self.device.type != "cpu" and not _same_on_host(self._on_host, _on_host(self._host)):
            raise UnsupportedError(
                "step draws random numbers on the CPU, which a replay would not draw again: draw "
                "them on the GPU, torch.rand(..., device=x.device), or give them as an input."
            )

    def _refuse_settings(self, what: str) -> None:
        found = self.settings()
        if found == self._settings:
            return
        for now, before in zip(found, self._settings, strict=False):
            if now != before:
                optimizer, _, key, value = now
                name = f"{key} of {type(optimizer).__name__} from {before[3]} to {value}"
                tensor = "lr=torch.tensor(lr, device=...) and capturable=True (of SGD: fused=True)"
                mend = f"make it a tensor, {tensor}" if key == "lr" else "capture again"
                raise UnsupportedError(
                    f"{what.format(name)}, which the captured graph has as a number: {mend}."
                )
        raise UnsupportedError("the groups of an optimizer have changed: capture again.")

    def check(self) -> None:
        """Refuse to replay where what the graph reads is no longer what the user holds."""
        for name, tensor, place in self._places:
            if tensor.data_ptr() != place:
                raise DeviceError(f"{name} has moved since it was captured: capture again.")
        for optimizer, state in self._states:
            if optimizer.state is not state:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} has loaded another state since it was captured: "
                    "load before capture, or capture again."
                )
        for module, training in self._trained:
            if module.training is not training:
                ways = ("evaluation", "training")
                raise UnsupportedError(
                    f"a {type(module).__name__} is in {ways[module.training]}, but was captured in "
                    f"{ways[training]}: capture one function for each."
                )
        self._refuse_settings("since it was captured somebody changed {}")

    def observed(self) -> dict[str, Tensor]:
        """Copy what a run has left: tensors, optimizer state and gradients, by their names."""
        found = {name: t for name, t in self.tensors.values()}
        found |= {f"the gradient of {n}": p.grad for n, p in self.parameters if p.grad is not None}
        for optimizer, _, p, name in self.fresh:
            found |= {
                f"{key} of {name}": one
                for key, one in optimizer.state.get(p, {}).items()
                if isinstance(one, Tensor)
            }
        return {name: t.detach().clone() for name, t in found.items()}


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


def unsteady(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Name a result or gradient that differs between two runs by more than atomics can."""
    for name in one:
        if name.startswith(("result ", "the gradient of ")):
            apart = _largest(one[name].double() - other[name].double())
            if apart > COARSE * _largest(one[name]):
                return f"{name} differs by {apart:.1e}, where it is {_largest(one[name]):.1e}"
    return ""


def _kind(name: str) -> str:
    """What has one scale: one state of all parameters, their gradients, or a tensor by itself."""
    return name.partition(" of ")[0] if " of " in name else name


def _largest(values: Tensor) -> float:
    return float(values.double().nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0


def _cloned(value: Tensor | None) -> Any:
    return None if value is None else value.detach().clone()


def _plain(one: Any) -> Iterator[tuple[str, Any]]:
    """Give attributes that are numbers or text: ``training``, and counters of the user's."""
    return ((k, v) for k, v in vars(one).items() if isinstance(v, bool | int | float | str))


def _on_host(generators: list[torch.Generator]) -> tuple[Any, ...]:
    numpy = np.random.get_state()  # noqa: NPY002
    states = [one.get_state() for one in generators]
    return torch.get_rng_state(), random.getstate(), numpy, *states


def _same_on_host(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    tensors = zip((one[0], *one[3:]), (other[0], *other[3:]), strict=True)
    numpy = np.array_equal(one[2][1], other[2][1]) and one[2][2:] == other[2][2:]
    return numpy and one[1] == other[1] and all(torch.equal(a, b) for a, b in tensors)
