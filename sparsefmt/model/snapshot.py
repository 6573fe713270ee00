"""What a model holds, so that a run of its forward can be undone."""

from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from .state import OF_MODULES, Key, is_leaf


class Snapshot:
    """Buffers, attributes, and containers of a key; parameters are not copied."""

    def __init__(self, model: Module, key: Key) -> None:
        tensors = {id(t): (name, t) for name, t in model.named_buffers() if not t.is_inference()}
        for label, one in key.held:
            if isinstance(one, Tensor) and not one.is_inference():
                tensors.setdefault(id(one), (label, one))
        norms = (m for m in model.modules() if isinstance(m, _NormBase))
        #: Running means change without a version.
        self._running = {id(buffer) for norm in norms for buffer in norm.buffers()}
        self._tensors = [(n, t, t._version, t.detach().clone()) for n, t in tensors.values()]
        self._held = [(label, one, _copy(one)) for label, one in key.held if _copy(one) is not None]
        self._attributes = [
            (prefix, vars(module), dict(_own(vars(module))))
            for prefix, module in model.named_modules()
            if not is_leaf(module)
        ]

    def restore(self) -> list[str]:
        """Put back what has changed, and name it."""
        changed = []
        for prefix, now, before in self._attributes:
            found = dict(_own(now))
            names = [n for n in {**before, **found} if before.get(n, n) is not found.get(n, n)]
            changed += [f"{prefix}.{name}" if prefix else name for name in names]
            for name in names:
                now.pop(name, None)
                now.update({name: before[name]} if name in before else {})
        for label, one, before in self._held:
            if not _same(_copy(one), before):
                changed.append(label)
                _fill(one, before)
        for name, tensor, version, values in self._tensors:
            if tensor._version != version or (
                id(tensor) in self._running
                and not torch.allclose(tensor, values, rtol=0, atol=0, equal_nan=True)
            ):
                changed.append(name)
                with torch.no_grad():
                    tensor.copy_(values)
        return changed


def _own(attributes: MutableMapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in attributes.items() if name not in OF_MODULES)


def _copy(one: Any) -> Any:
    """Give what a container or an object holds; None of what cannot be written to."""
    if isinstance(one, Module | Tensor | type):
        return None
    if isinstance(one, list | deque):
        return [*one]
    if isinstance(one, dict):
        return dict(one)
    if isinstance(one, set):
        return {*one}
    found = getattr(one, "__dict__", None)
    return dict(found) if isinstance(found, dict) else None


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, set):
        return bool(now == before)
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(now[k] is before[k] for k in before)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _fill(one: Any, before: Any) -> None:
    into: Any = one if isinstance(one, list | deque | dict | set) else vars(one)
    into.clear()
    (into.extend if isinstance(before, list) else into.update)(before)
