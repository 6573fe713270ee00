"""First lines of docstrings begin with a plain verb, and names say what they hold."""

import ast
import re

from test_architecture import FUNCTION, SOURCES, parse, where

NO_VERB = re.compile(r"(Give|Tell|Say|Whether|What|How|Where|Which|Of|Those|That|The|A|An)\b|\(")
#: Functions whose first line is the formula that they compute, of an entry or a row.
FORMULAS = 26


def test_first_lines_begin_with_a_verb():
    wrong, formulas = [], 0
    for path in SOURCES:
        for function in ast.walk(parse(path)):
            line = (ast.get_docstring(function) or "") if isinstance(function, FUNCTION) else ""
            formulas += line.startswith("``")
            if NO_VERB.match(line):
                wrong.append(f"{where(path, function.lineno)} {line.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
    assert formulas <= FORMULAS


#: They name no object: say ``result``, ``args``, ``cached``, ``direct`` or what it holds.
NO_NAMES = set(
    "found given held kept way beside away once at_once here other others one how usual whole "
    "bare plain heard watched".split()
)
#: Python's own word for the other side of ``==``, and a documented field of a candidate.
NAMES = {("base.py", "other"), ("planner.py", "once")}


def name_of(node: ast.AST) -> str:
    """Return the name that a node binds: a function's, a parameter's, a variable's or a field's."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return ""


def test_names_say_what_they_hold():
    wrong = {
        (path.name, name)
        for path in SOURCES
        for node in ast.walk(parse(path))
        if (name := name_of(node)).strip("_") in NO_NAMES
    }
    assert wrong == NAMES
