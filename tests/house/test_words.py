"""First lines of docstrings: a plain verb, and the object that it acts on."""

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
