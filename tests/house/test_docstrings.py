"""Public functions say in numpydoc what they take, give and refuse."""

import builtins
import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from typing import Unpack, get_args, get_origin, get_type_hints

import pytest

from sparsefmt import errors

MODULES = ["sparsefmt", "sparsefmt.ops"]
if find_spec("torch"):
    MODULES += ["sparsefmt.autograd", "sparsefmt.nn", "sparsefmt.distributed"]
PUBLIC = {
    f"{module}.{name}": getattr(import_module(module), name)
    for module in MODULES
    for name in import_module(module).__all__
    if name != "optimize" or find_spec("torch")
}
FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]
LAYERS = [name for name in PUBLIC if name.startswith("sparsefmt.nn.") and name not in FUNCTIONS]


def sections(value):
    """Title -> text of each section; the text before the first one is under ``""``."""
    text = inspect.getdoc(value) or ""
    _, *rest = parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", text, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(rest[::2], rest[1::2], strict=True))


def documented(text):
    """The names before the colons of a section: ``row_scale, col_scale`` are two."""
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    return [name.lstrip("*") for line in lines for name in line.split(" : ")[0].split(", ")]


def taken(function):
    """The names that it takes; of keywords gathered by a TypedDict the keys."""
    names = list(inspect.signature(function).parameters)
    for gathered in get_type_hints(getattr(function, "__init__", function)).values():
        if get_origin(gathered) is Unpack:
            names = [*names[:-1], *get_type_hints(*get_args(gathered))]
    return names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_documents_its_parameters_and_what_it_returns(name):
    function = PUBLIC[name]
    signature, found = inspect.signature(function), sections(function)
    assert re.match(r"[^\n]+\.(\n\n|$)", found[""]), "the first line is not one sentence"
    # Parameters that are alike stand together, so the order may differ.
    assert sorted(documented(found.get("Parameters", ""))) == sorted(signature.parameters)
    assert ("Returns" in found) == (signature.return_annotation not in (None, "None"))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_documents_its_parameters_and_those_of_its_call(name):
    layer = PUBLIC[name]
    assert sorted(documented(sections(layer)["Parameters"])) == sorted(taken(layer))
    call = sections(layer.forward)
    if "Parameters" in call:
        _, *takes = inspect.signature(layer.forward).parameters
        assert sorted(documented(call["Parameters"])) == sorted(takes)
    else:  # in a line, by those of a layer that has them
        assert "arguments" in call[""] or len(inspect.signature(layer.forward).parameters) == 2


#: They take a format, which was checked when it was made.
REFUSE_NOTHING = {"sparsefmt.clear_caches", "sparsefmt.to_edge_index"}


@pytest.mark.parametrize("name", [*FUNCTIONS, *LAYERS])
def test_errors_are_named(name):
    found = sections(PUBLIC[name])
    assert ("Raises" in found) == (name not in REFUSE_NOTHING)
    for line in found.get("Raises", "").splitlines():
        if line and not line[0].isspace():
            unknown = [e for e in line.split(", ") if not hasattr(errors, e)]
            assert all(issubclass(getattr(builtins, e), Exception) for e in unknown)
