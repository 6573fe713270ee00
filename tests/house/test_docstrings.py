"""Public functions say in numpydoc what they take, return and refuse."""

import builtins
import inspect
from importlib import import_module
from typing import Unpack, get_args, get_origin, get_type_hints

import pytest

pytest.importorskip("numpydoc")

from numpydoc.docscrape import get_doc_object
from numpydoc.validate import Validator, validate

from sparsefmt import errors

MODULES = [f"sparsefmt{name}" for name in ("", ".ops", ".autograd", ".nn", ".distributed")]
PUBLIC = {
    f"{module}.{name}": getattr(import_module(module), name)
    for module in MODULES
    for name in import_module(module).__all__
}
FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]
LAYERS = [name for name in PUBLIC if name.startswith("sparsefmt.nn.") and name not in FUNCTIONS]
#: There are a docstring and its first line, one sentence; parameters and results are those of the
#: signature.  Parameters that are alike stand together, so their order (PR03) may differ.
CHECKS = {"GL08", "PR01", "PR02", "RT01", "SS03", "SS06"}
#: They take a format, which was checked when it was made.
REFUSE_NOTHING = {"sparsefmt.clear_caches", "sparsefmt.to_edge_index"}


def documented(value):
    """Return the names of the parameters that a docstring has."""
    return sorted(name.lstrip("*") for name in Validator(get_doc_object(value)).doc_all_parameters)


def taken(function):
    """Return the names that it takes; of keywords gathered by a TypedDict the keys."""
    names = list(inspect.signature(function).parameters)
    for gathered in get_type_hints(getattr(function, "__init__", function)).values():
        if get_origin(gathered) is Unpack:
            names = [*names[:-1], *get_type_hints(*get_args(gathered))]
    return sorted(names)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_documents_its_parameters_and_what_it_returns(name):
    assert [text for code, text in validate(name)["errors"] if code in CHECKS] == []
    returns = inspect.signature(PUBLIC[name]).return_annotation not in (None, "None")
    assert bool(get_doc_object(PUBLIC[name])["Returns"]) == returns


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_documents_its_parameters_and_those_of_its_call(name):
    layer = PUBLIC[name]
    assert documented(layer) == taken(layer)
    takes = [one for one in taken(layer.forward) if one != "self"]
    # Else in a line, by those of a layer that has them.
    assert documented(layer.forward) == takes or (
        not documented(layer.forward)
        and (len(takes) == 1 or "arguments" in inspect.getdoc(layer.forward))
    )


@pytest.mark.parametrize("name", [*FUNCTIONS, *LAYERS])
def test_errors_are_named(name):
    raised = [e for one in get_doc_object(PUBLIC[name])["Raises"] for e in one.type.split(", ")]
    assert bool(raised) == (name not in REFUSE_NOTHING)
    for error in raised:
        assert issubclass(getattr(errors, error, None) or getattr(builtins, error), Exception)
