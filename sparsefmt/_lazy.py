"""Public names of the sub-packages, imported at their first use (PEP 562).

``sparsefmt/__init__.py`` does the same without this file: hypothesis imports it through the
plug-in, and should load nothing else.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def facade(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Build a package's ``__all__``, ``__getattr__`` and ``__dir__`` of its modules' public names.

    ``modules`` has the names that each module defines, with spaces between.
    """
    public = {name: module for module, names in modules.items() for name in names.split()}
    names = sorted(public)
    return names, resolver(package, public), lambda: names


def resolver(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Build a package's ``__getattr__``: ``modules`` maps each name to the module of it."""

    def resolve(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return resolve
