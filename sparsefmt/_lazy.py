"""Public names of the sub-packages, imported when first used (PEP 562).

``sparsefmt`` itself does the same in its own file: hypothesis imports that through the plug-in, and
should load no second one.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def resolver(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``: ``modules`` says which of its modules defines each name."""

    def resolve(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return resolve
