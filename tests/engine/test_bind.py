"""What ``bind`` refuses of every argument that a row describes, of arrays and of tensors."""

import re

import numpy as np
import pytest

from sparsefmt import CSR, DtypeError, ShapeError, UnsupportedError
from sparsefmt.ops import maxk
from sparsefmt.ops.engine import table
from sparsefmt.ops.engine.bind import bind
from sparsefmt.ops.engine.table import FIRST, OUT

F32 = np.float32
A = CSR([0, 2, 3, 6], [0, 1, 4, 0, 2, 3], np.ones(6, F32), shape=(3, 5))
SQUARE = CSR([0, 1, 3, 6], [0, 1, 2, 0, 1, 2], np.ones(6, F32), shape=(3, 3))
#: Those with arguments that public functions bind; factors alone have no others to be like.
ROWS = {
    op.name: op
    for op in table.operations()
    if any(arg.rows and arg.like != FIRST for arg in op.arguments)
}


def name_of(arg):
    return arg.also[0] if arg.also else arg.name


def matrix_for(op):
    return SQUARE if any(arg.rows == "vertices" for arg in op.arguments) else A


def valid(op, arg):
    """A value that the row allows: features have 4 columns and no heads."""
    if arg.rows == "heads":
        return np.ones(4, F32)
    n_rows, n_cols = matrix_for(op).shape
    size = {"cols": n_cols, "entries": A.nnz}.get(arg.rows, n_rows)
    if arg.balanced:
        return maxk(np.ones((size, 4), F32), 2)
    return np.ones((size,) if arg.score or 1 in arg.axes else (size, 4), F32)


def arguments(op):
    """Every argument that has rows, those first that others are like."""
    bound = [arg for arg in op.named.values() if arg.rows]
    bound = list({arg.name: arg for arg in bound}.values())
    bound.sort(key=lambda arg: (bool(arg.like), arg.like == FIRST))
    return {name_of(arg): valid(op, arg) for arg in bound}


#: Row, argument
ARGUMENTS = [
    pytest.param(op, op.named[name], id=f"{op.name}-{name}")
    for op in ROWS.values()
    for name in arguments(op)
]


def call(op, **changed):
    return bind(op, matrix_for(op), **(arguments(op) | changed))


def is_of(name, text=""):
    return f"^{re.escape(name)} {text}" if text else f"^{re.escape(name)}\\b"


@pytest.mark.parametrize("op", ROWS.values(), ids=ROWS)
def test_arguments_that_fit_are_returned_as_they_are(op):
    values = arguments(op)
    matrix, *results = bind(op, matrix_for(op), **values)
    assert matrix is matrix_for(op)
    for result, value in zip(results, values.values(), strict=True):
        assert result is value


@pytest.mark.parametrize(("op", "arg"), ARGUMENTS)
def test_none_is_refused_where_it_is_no_choice(op, arg):
    name = name_of(arg)
    if not arg.optional:
        with pytest.raises(DtypeError, match=is_of(name, "is (None: give an array|a NoneType)")):
            call(op, **{name: None})
        return
    result = dict(zip(arguments(op), call(op, **{name: None})[1:], strict=True))[name]
    assert result is (A.data if arg.stored else None)


@pytest.mark.parametrize(("op", "arg"), ARGUMENTS)
def test_other_dtypes_are_refused(op, arg):
    name, value = name_of(arg), valid(op, arg)
    if not arg.like or arg.balanced:
        return
    first = next(iter(arguments(op))) if arg.like == FIRST else name_of(op.named[arg.like])
    with pytest.raises(DtypeError, match=is_of(name, f"is float64 but {first} is float32: cast")):
        call(op, **{name: value.astype(np.float64)})
    if not arg.widens:
        return
    halves = {
        each: one if each == name or one is None else one.astype(np.float16)
        for each, one in arguments(op).items()
    }
    B = matrix_for(op).astype(np.float16)
    assert dict(zip(halves, bind(op, B, **halves)[1:], strict=True))[name].dtype == F32


@pytest.mark.parametrize(("op", "arg"), ARGUMENTS)
def test_other_widths_and_heads_are_refused(op, arg):
    name, value = name_of(arg), valid(op, arg)
    if not arg.like:
        return
    if arg.balanced:
        with pytest.raises(ShapeError, match=is_of(name, "has 7 columns but .*same feature width")):
            call(op, **{name: maxk(np.ones((len(value.data), 7), F32), 2)})
    elif arg.check == "features":
        with pytest.raises(ShapeError, match=is_of(name, "has shape .* but .* has .*: give both")):
            call(op, **{name: value[:, 1:]})
    elif arg.trailing:
        with pytest.raises(ShapeError, match=is_of(name, "has shape .*give")):
            call(op, **{name: np.stack([value, value], -1)})


WORDS = [
    pytest.param(op, arg, id=f"{op.name}-{name}")
    for op in table.operations()
    for name, arg in op.named.items()
    if arg.words
]


@pytest.mark.parametrize(("op", "arg"), WORDS)
def test_other_words_are_refused(op, arg):
    for word in arg.words:
        assert bind(op, A, **{arg.name: word})[1] == word
    choices = ", ".join(f'"{word}"' for word in arg.words[:-1]) + f' or "{arg.words[-1]}"'
    for value in ("median", None, 3, [arg.words[0]]):
        text = f"{arg.name} is {value!r}: use {choices}."
        with pytest.raises(UnsupportedError, match=re.escape(text)):
            bind(op, A, **{arg.name: value})


@pytest.mark.parametrize(
    "op", [op for op in ROWS.values() if OUT.name in op.named], ids=lambda op: op.name
)
def test_out_that_is_none_stays_none(op):
    assert call(op, out=None)[-1] is None
