"""The hypothesis plug-in: ``st.from_type(sparsefmt.CSR)`` draws matrices.

Hypothesis calls ``register`` whenever it is imported, also by people who do not use sparsefmt, so
that loads neither NumPy nor a format: a format is registered now if its module is loaded, else when
it is imported.  The strategies are built at their first use.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

#: Module -> its classes that get a strategy.
_CLASSES = {
    "sparsefmt.formats.base": ("Format",),
    "sparsefmt.formats.compressed": ("COO", "CSR", "CSC"),
    "sparsefmt.formats.cbsr": ("CBSR",),
    "sparsefmt.formats.sgt": ("SGT",),
}


def register() -> None:
    """Register a strategy for each format, now or when the format is first imported."""
    # A module has its last class once it was executed to its end; its import may be under way.
    later = [m for m in _CLASSES if not all(hasattr(sys.modules.get(m), c) for c in _CLASSES[m])]
    for name in _CLASSES.keys() - later:
        _register_classes(sys.modules[name])
    if later and not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(later))


def _register_classes(module: ModuleType) -> None:
    from hypothesis.strategies import register_type_strategy
    from hypothesis.vendor.pretty import for_type_by_name

    for name in _CLASSES[module.__name__]:
        register_type_strategy(getattr(module, name), partial(_strategy, name))
        for_type_by_name("sparsefmt", name, _print)  # as ``__module__`` says


def _print(A: Any, printer: Any, cycle: bool) -> None:
    """Print the call that makes a matrix, to be pasted: every value, and shapes without any."""
    import numpy as np

    names, parts = [*A._array_fields, "shape", *(["tile"] if A.format == "sgt" else [])], []
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        for name in names:
            value = getattr(A, name)
            text = repr(value)
            if getattr(value, "size", 1) == 0:
                text = f"np.empty({value.shape}, {value.dtype.name!r})"
            parts.append(f"{name}={text}")
    printer.text(f"{type(A).__name__}({', '.join(parts)})")


def _strategy(name: str, asked: type) -> Any:
    from .. import testing

    if name == "Format":
        return testing.graphs(format=None) | testing.cbsr()
    return getattr(testing, name.lower())()


class _Watch:
    """An import finder without modules, which learns when a format's module is loaded."""

    def __init__(self, names: Sequence[str]) -> None:
        self.waiting = set(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, with a call after the module was executed."""
        if name not in self.waiting:
            return None
        self.waiting.discard(name)  # the search below comes here again
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_classes(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        return spec
