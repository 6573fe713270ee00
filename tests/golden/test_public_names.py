"""Names that users import: those of each package's ``__all__``, and all that a page names.

``public_names.txt`` lists them, one a line; of ``sparsefmt.autograd`` only those that a page names.
"""

import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LISTED = set(Path(__file__).with_name("public_names.txt").read_text().split())
PACKAGES = "", ".ops", ".nn", ".interop", ".testing", ".plan", ".distributed"
#: Packages whose public names are no ``__all__``: it has others, or there is none.
WITHOUT_ALL = "sparsefmt.autograd.", "sparsefmt.io."

_IMPORT = re.compile(r"\bfrom (sparsefmt[\w.]*) import (?:\(([^)]*)\)|([^\n`#(]+))")
_DOTTED = re.compile(r"(?<![\w./-])sparsefmt(?:\.[A-Za-z_]\w*)+")


def named_by(page: Path) -> set[str]:
    """Return the dotted names of the package that a page imports or writes out."""
    text = page.read_text(encoding="utf-8")
    names = set(_DOTTED.findall(text))
    for module, enclosed, line in _IMPORT.findall(text):
        imported = (name.split(" as ")[0].strip() for name in (enclosed or line).split(","))
        names |= {f"{module}.{name}" for name in imported if name}
    return names


def is_there(name: str) -> bool:
    """Import what a dotted name says, attributes before modules."""
    path, *rest = name.split(".")
    value = import_module(path)
    for part in rest:
        path = f"{path}.{part}"
        try:
            value = getattr(value, part) if hasattr(value, part) else import_module(path)
        except ImportError:
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_of_a_page_are_there(page):
    names = named_by(page)
    assert [name for name in sorted(names) if not is_there(name)] == []
    if page.parent.name != "decisions":
        of_autograd = {name for name in names if name.startswith("sparsefmt.autograd.")}
        assert of_autograd <= LISTED, "list them in public_names.txt"


def test_packages_have_the_public_names_that_are_listed():
    modules = [import_module(f"sparsefmt{package}") for package in PACKAGES]
    names = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    listed = {name for name in LISTED if not name.startswith(WITHOUT_ALL)}
    assert sorted(listed - names) == [], "removed"
    assert sorted(names - listed) == [], "added: list them in public_names.txt"
    assert [name for name in sorted(LISTED) if not is_there(name)] == []


def test_modules_are_there_after_the_import_of_the_package_alone():
    package = import_module("sparsefmt")
    names = {found.name for found in iter_modules(package.__path__) if found.name[0] != "_"}
    assert names <= {*dir(package)}
    assert all(package.__getattr__(name).__name__ == f"sparsefmt.{name}" for name in names)
