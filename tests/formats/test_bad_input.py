"""Bad input is refused by class and by a text that names the argument, its value and the mend."""

import re
import sys
import tracemalloc
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import sparsefmt
from sparsefmt import CBSR, COO, CSC, CSR, SGT, from_dense
from sparsefmt.errors import (
    DeviceError,
    DtypeError,
    FileFormatError,
    FormatError,
    IndexRangeError,
    KernelLaunchError,
    OutOfMemoryError,
    RankError,
    ShapeError,
    SparseFmtError,
    UnsupportedError,
)
from sparsefmt.formats import arrays as formats_arrays
from sparsefmt.formats import checks, convert

#: Every text says what to do; these are the words that do it.
MEND = re.compile(
    r"\b(give|use|cast|must|cannot be negative|sizes go to|sizes are positive|lies between|install"
    r"|detach|fill|store|count from|no slice of|take a part|only \"sgt\" has|is made from|sort)\b"
)


class Case(NamedTuple):
    name: str
    build: Callable[[ModuleType], Any]
    error: type[SparseFmtError]
    text: str  #: a regular expression


def refuse(case: Case, xp: ModuleType) -> None:
    with pytest.raises(case.error, match=case.text) as caught:
        case.build(xp)
    assert type(caught.value) is case.error
    assert str(caught.value).endswith((".", ".)"))
    assert MEND.search(str(caught.value)), str(caught.value)


def array(xp: ModuleType, value: Any, dtype: Any = np.int32) -> Any:
    """Plain sequences as arrays of ``dtype``; anything else as it is."""
    return xp.asarray(value, dtype) if isinstance(value, list | tuple) else value


def coo(xp, row=(0, 1), col=(1, 0), data=None, shape=(2, 2), index=np.int32, **options):
    row, col, data = array(xp, row, index), array(xp, col, index), array(xp, data, np.float32)
    return COO(row, col, data, shape=shape, **options)


def csr(xp, indptr=(0, 1, 2), indices=(1, 0), data=None, shape=(2, 2), to=CSR, **options):
    arrays = array(xp, indptr), array(xp, indices), array(xp, data, np.float32)
    return to(*arrays, shape=shape, **options)


def csc(xp, **options):
    return csr(xp, to=CSC, **options)


def cbsr(xp, indices=((0, 2), (1, 2)), data=((1, 2), (3, 4)), shape=(2, 3), index=np.uint8):
    return CBSR(array(xp, indices, index), array(xp, data, np.float32), shape=shape)


#: [[a . b], [. c .], [d . .]] in tiles of two rows and two columns: windows of 3 and 1 columns.
GOOD_SGT: dict[str, Any] = {
    "window_ptr": [0, 2, 3],
    "columns": [[0, 1], [2, -1], [0, -1]],
    "tile_ptr": [0, 2, 3, 4],
    "slots": [0, 3, 0, 0],
    "order": [0, 2, 1, 3],
    "data": None,
    "shape": (3, 3),
    "tile": (2, 2),
}


def sgt(xp, **changes):
    fields = {**GOOD_SGT, **changes}
    dtypes = {"slots": np.uint8, "data": np.float32}
    for name in fields.keys() - {"shape", "tile"}:
        fields[name] = array(xp, fields[name], dtypes.get(name, np.int32))
    return SGT(**fields)


def huge(xp, dtype=np.int32, size=2**31):
    """An array of ``size`` places in a few bytes."""
    return xp.broadcast_to(xp.zeros(1, dtype), (size,))


def good(xp):
    return csr(xp, data=[1, 2])


def test_the_unchanged_examples_are_accepted(xp):
    for make in (coo, csr, csc, cbsr, sgt):
        assert make(xp).nnz


SHAPES = [
    Case(f"shape {shape!r}", lambda xp, shape=shape: coo(xp, shape=shape), error, text)
    for shape, error, text in [
        ((-1, 2), ShapeError, r"shape is \(-1, 2\): sizes cannot be negative"),
        ((2, -1), ShapeError, r"shape is \(2, -1\): sizes cannot be negative"),
        ((2.0, 2), ShapeError, r"shape is \(2\.0, 2\): give two integers \(n_rows, n_cols\)"),
        (("2", "2"), ShapeError, r"shape is \('2', '2'\): give two integers"),
        ("22", ShapeError, r"shape is '22': give two integers"),
        ((2, 2, 2), ShapeError, r"shape is \(2, 2, 2\): give two integers"),
        ((2,), ShapeError, r"shape is \(2,\): give two integers"),
        (2, ShapeError, r"shape is 2: give two integers"),
        (None, ShapeError, r"shape is None: give two integers"),
        ((None, 2), ShapeError, r"shape is \(None, 2\): give two integers"),
        ((2**62, 2), IndexRangeError, r"shape is \(4611686018427387904, 2\): sizes go to 115"),
        ((2**31, 2), IndexRangeError, r"\(2147483648, 2\) with 2 entries .* int32 .* int64"),
        ((2, 2**31), IndexRangeError, r"\(2, 2147483648\) with 2 entries .* int32 .* int64"),
    ]
]

COOS = [
    Case(
        "row 2-D", lambda xp: coo(xp, row=[[0, 1]]), ShapeError, r"row has shape \(1, 2\): give a 1"
    ),
    Case(
        "col 0-D", lambda xp: coo(xp, col=xp.int32(1)), ShapeError, r"col has shape \(\): give a 1"
    ),
    Case(
        "col longer",
        lambda xp: coo(xp, col=[1, 0, 1]),
        ShapeError,
        r"col has shape \(3,\): give \(2,\), row and col describe the same entries",
    ),
    Case("row empty", lambda xp: coo(xp, row=[]), ShapeError, r"col has shape \(2,\): give \(0,\)"),
    Case(
        "row negative",
        lambda xp: coo(xp, row=[0, -1]),
        IndexRangeError,
        r"row\[1\] is -1 but there are 2 rows: use 0 to 1",
    ),
    Case("row large", lambda xp: coo(xp, row=[2, 0]), IndexRangeError, r"row\[0\] is 2 .* 2 rows"),
    Case("col negative", lambda xp: coo(xp, col=[0, -7]), IndexRangeError, r"col\[1\] is -7"),
    Case(
        "col large", lambda xp: coo(xp, col=[9, 9]), IndexRangeError, r"col\[0\] is 9 .* 2 columns"
    ),
    Case(
        "no rows",
        lambda xp: coo(xp, row=[0], col=[0], shape=(0, 1)),
        IndexRangeError,
        r"row\[0\] is 0 but there are 0 rows: store no entries",
    ),
    Case(
        "row float",
        lambda xp: coo(xp, index=np.float32),
        DtypeError,
        r"row\.dtype is float32: indices are int32 or int64, cast",
    ),
    Case(
        "row bool", lambda xp: coo(xp, index=bool), DtypeError, r"row\.dtype is bool: indices are"
    ),
    Case("row uint", lambda xp: coo(xp, index=np.uint32), DtypeError, r"row\.dtype is uint32"),
    Case("row int16", lambda xp: coo(xp, index=np.int16), DtypeError, r"row\.dtype is int16"),
    Case(
        "row complex", lambda xp: coo(xp, index=np.complex64), DtypeError, r"is complex64: indices"
    ),
    Case(
        "mixed",
        lambda xp: coo(xp, col=xp.zeros(2, np.int64)),
        DtypeError,
        r"col is int64 but row is int32: give both the same index dtype",
    ),
    Case(
        "data longer",
        lambda xp: coo(xp, data=[1, 2, 3]),
        ShapeError,
        r"data has shape \(3,\) but the structure stores \(2,\): give one value per stored entry",
    ),
    Case("data 2-D", lambda xp: coo(xp, data=[[1], [2]]), ShapeError, r"data has shape \(2, 1\)"),
    Case("data 0-D", lambda xp: coo(xp, data=xp.float32(1)), ShapeError, r"data has shape \(\)"),
    Case(
        "data int",
        lambda xp: coo(xp, data=xp.ones(2, np.int64)),
        DtypeError,
        r"data\.dtype is int64: values are float16, bfloat16, float32 or float64, cast",
    ),
    Case(
        "data bool", lambda xp: coo(xp, data=xp.ones(2, bool)), DtypeError, r"dtype is bool: values"
    ),
    Case(
        "data complex",
        lambda xp: coo(xp, data=xp.ones(2, np.complex64)),
        DtypeError,
        r"data\.dtype is complex64: values are",
    ),
    Case(
        "data uint8", lambda xp: coo(xp, data=xp.ones(2, np.uint8)), DtypeError, r"is uint8: values"
    ),
    Case("row None", lambda xp: coo(xp, row=None), DtypeError, r"row is None: give an array"),
    Case(
        "validate",
        lambda xp: coo(xp, validate="none"),
        UnsupportedError,
        r"validate is 'none': use \"full\" or \"cheap\"",
    ),
    Case("validate None", lambda xp: coo(xp, validate=None), UnsupportedError, r"validate is None"),
    Case(
        "too many entries",
        lambda xp: COO(huge(xp), huge(xp), shape=(1, 1)),
        IndexRangeError,
        r"with 2147483648 entries goes beyond int32 \(at most 2147483647\): use int64 indices",
    ),
]

COMPRESSED = [
    Case(
        "indptr 2-D", lambda xp: csr(xp, indptr=[[0, 1, 2]]), ShapeError, r"indptr has shape \(1, 3"
    ),
    Case(
        "indices 2-D", lambda xp: csr(xp, indices=[[1, 0]]), ShapeError, r"indices has shape \(1, 2"
    ),
    Case(
        "indptr short",
        lambda xp: csr(xp, indptr=[0, 2]),
        ShapeError,
        r"indptr has shape \(2,\): give \(3,\), one per row and an end",
    ),
    Case(
        "indptr long",
        lambda xp: csr(xp, indptr=[0, 1, 2, 2]),
        ShapeError,
        r"shape \(4,\): give \(3",
    ),
    Case("indptr empty", lambda xp: csr(xp, indptr=[]), ShapeError, r"indptr has shape \(0,\)"),
    Case(
        "indptr None", lambda xp: csr(xp, indptr=None), DtypeError, r"indptr is None: give an arr"
    ),
    Case(
        "csc indptr",
        lambda xp: csc(xp, shape=(2, 3)),
        ShapeError,
        r"indptr has shape \(3,\): give \(4,\), one per column and an end",
    ),
    Case(
        "first",
        lambda xp: csr(xp, indptr=[1, 1, 2]),
        FormatError,
        r"indptr\[0\] is 1: the first pointer must be 0",
    ),
    Case(
        "first negative", lambda xp: csr(xp, indptr=[-1, 1, 2]), FormatError, r"indptr\[0\] is -1"
    ),
    Case(
        "decreasing",
        lambda xp: csr(xp, indptr=[0, 3, 2]),
        FormatError,
        r"indptr decreases from 3 to 2 at position 2: pointers must not decrease",
    ),
    Case(
        "decreasing below zero",
        lambda xp: csr(xp, indptr=[0, -1, 2]),
        FormatError,
        r"indptr decreases from 0 to -1 at position 1",
    ),
    Case(
        "last small",
        lambda xp: csr(xp, indptr=[0, 1, 1]),
        FormatError,
        r"indptr\[-1\] is 1: the last pointer must be 2",
    ),
    Case("last large", lambda xp: csr(xp, indptr=[0, 1, 9]), FormatError, r"indptr\[-1\] is 9"),
    Case(
        "last without entries",
        lambda xp: csr(xp, indptr=[0, 0, 1], indices=[]),
        FormatError,
        r"indptr\[-1\] is 1: the last pointer must be 0",
    ),
    Case(
        "column negative",
        lambda xp: csr(xp, indices=[1, -1]),
        IndexRangeError,
        r"indices\[1\] is -1 but there are 2 columns: use 0 to 1, or a larger shape",
    ),
    Case(
        "column large",
        lambda xp: csr(xp, indices=[2, 5]),
        IndexRangeError,
        r"indices\[0\] is 2 but",
    ),
    Case(
        "csc row large",
        lambda xp: csc(xp, indices=[0, 2]),
        IndexRangeError,
        r"\[1\] is 2 .* 2 rows",
    ),
    Case("csc row negative", lambda xp: csc(xp, indices=[-2, 0]), IndexRangeError, r"\[0\] is -2"),
    Case("csc decreasing", lambda xp: csc(xp, indptr=[0, 2, 1]), FormatError, r"indptr decreases"),
    Case(
        "csc last",
        lambda xp: csc(xp, indptr=[0, 0, 0]),
        FormatError,
        r"indptr\[-1\] is 0: the last",
    ),
    Case(
        "indptr float",
        lambda xp: csr(xp, indptr=xp.zeros(3)),
        DtypeError,
        r"indptr\.dtype is float64: indices are int32 or int64",
    ),
    Case(
        "indptr uint64", lambda xp: csr(xp, indptr=xp.zeros(3, np.uint64)), DtypeError, r"is uint64"
    ),
    Case(
        "indices bool", lambda xp: csr(xp, indices=xp.zeros(2, bool)), DtypeError, r"indices\.dtype"
    ),
    Case(
        "indices int8",
        lambda xp: csr(xp, indices=xp.zeros(2, np.int8)),
        DtypeError,
        r"is int8: ind",
    ),
    Case(
        "mixed",
        lambda xp: csr(xp, indices=xp.zeros(2, np.int64)),
        DtypeError,
        r"indices is int64 but indptr is int32: give both the same index dtype",
    ),
    Case(
        "data short",
        lambda xp: csr(xp, data=[1]),
        ShapeError,
        r"data has shape \(1,\) but the struc",
    ),
    Case(
        "data int",
        lambda xp: csr(xp, data=xp.ones(2, np.int32)),
        DtypeError,
        r"data\.dtype is int32",
    ),
    Case(
        "too many entries",
        lambda xp: csr(xp, indices=huge(xp)),
        IndexRangeError,
        r"with 2147483648 entries goes beyond int32 .* use int64 indices",
    ),
    Case("csc columns", lambda xp: csc(xp, shape=(2**31, 2)), IndexRangeError, r"beyond int32"),
    Case("validate", lambda xp: csr(xp, validate=True), UnsupportedError, r"validate is True: use"),
]

CBSRS = [
    Case(
        "equal columns",
        lambda xp: cbsr(xp, indices=[[0, 2], [1, 1]]),
        FormatError,
        r"indices\[1, 0:2\] is \[1, 1\]: columns of a row must ascend and be distinct",
    ),
    Case(
        "unsorted",
        lambda xp: cbsr(xp, indices=[[2, 0], [1, 2]]),
        FormatError,
        r"\[0, 0:2\] is \[2, 0",
    ),
    Case(
        "unsorted inside",
        lambda xp: cbsr(xp, [[0, 1, 3, 2]], [[1, 2, 3, 4]], (1, 4)),
        FormatError,
        r"indices\[0, 2:4\] is \[3, 2\]: columns of a row must ascend",
    ),
    Case(
        "column large",
        lambda xp: cbsr(xp, indices=[[0, 2], [1, 3]]),
        IndexRangeError,
        r"indices\[1, 1\] is 3 but there are 3 columns: use 0 to 2",
    ),
    Case(
        "column negative",
        lambda xp: cbsr(xp, [[-1]], [[1]], (1, 70000), np.int32),
        IndexRangeError,
        r"indices\[0, 0\] is -1 but there are 70000 columns",
    ),
    Case(
        "k is 0",
        lambda xp: cbsr(xp, xp.zeros((2, 0), np.uint8), xp.zeros((2, 0), np.float32)),
        ShapeError,
        r"k is 0 \(indices\.shape\[1\]\) but a row has 3 columns: k lies between 1 and n_cols",
    ),
    Case(
        "k > n_cols",
        lambda xp: cbsr(xp, shape=(2, 1)),
        ShapeError,
        r"k is 2 .* a row has 1 columns",
    ),
    Case(
        "no columns",
        lambda xp: cbsr(xp, shape=(2, 0)),
        ShapeError,
        r"k is 2 .* a row has 0 columns",
    ),
    Case(
        "1-D",
        lambda xp: cbsr(xp, indices=[0, 2]),
        ShapeError,
        r"indices has shape \(2,\): give \(n_rows, k\) with n_rows == 2",
    ),
    Case(
        "3-D", lambda xp: cbsr(xp, indices=[[[0, 2]]]), ShapeError, r"indices has shape \(1, 1, 2\)"
    ),
    Case(
        "too few rows", lambda xp: cbsr(xp, shape=(3, 3)), ShapeError, r"\(2, 2\): .* n_rows == 3"
    ),
    Case(
        "int32 for few columns",
        lambda xp: cbsr(xp, index=np.int32),
        DtypeError,
        r"indices\.dtype is int32 but 3 columns are stored as uint8: cast",
    ),
    Case(
        "uint16 for few", lambda xp: cbsr(xp, index=np.uint16), DtypeError, r"uint16 but 3 columns"
    ),
    Case("float", lambda xp: cbsr(xp, index=np.float32), DtypeError, r"is float32 but 3 columns"),
    Case(
        "257", lambda xp: cbsr(xp, shape=(2, 257)), DtypeError, r"uint8 but 257 .* stored as uint16"
    ),
    Case(
        "65537",
        lambda xp: cbsr(xp, shape=(2, 65537), index=np.uint16),
        DtypeError,
        r"uint16 but 65537 columns are stored as int32",
    ),
    Case(
        "int64",
        lambda xp: cbsr(xp, shape=(2, 70000), index=np.int64),
        DtypeError,
        r"int64 but 70000 columns are stored as int32",
    ),
    Case("2**31", lambda xp: cbsr(xp, shape=(2, 2**31)), IndexRangeError, r"2147483648\) .* int32"),
    Case(
        "no data",
        lambda xp: cbsr(xp, data=None),
        DtypeError,
        r"data is None: a CBSR holds features",
    ),
    Case(
        "data 1-D",
        lambda xp: cbsr(xp, data=[1, 2]),
        ShapeError,
        r"data has shape \(2,\) .* \(2, 2\)",
    ),
    Case(
        "data int",
        lambda xp: cbsr(xp, data=xp.ones((2, 2), np.int32)),
        DtypeError,
        r"data\.dtype is int32: values are",
    ),
    Case(
        "astype int64",
        lambda xp: cbsr(xp).astype(index_dtype=np.int64),
        UnsupportedError,
        r"index_dtype is .*int64.* but a CBSR of 3 columns stores them as uint8: use \.tocsr",
    ),
    Case(
        "astype nothing",
        lambda xp: cbsr(xp).astype(index_dtype="nope"),
        DtypeError,
        r"index_dtype is 'nope', which is no NumPy dtype",
    ),
    Case("drop data", lambda xp: cbsr(xp).with_data(None), DtypeError, r"data is None"),
    Case(
        "columns", lambda xp: cbsr(xp)[:, :1], UnsupportedError, r"columns: .* use A\.tocsr\(\)\["
    ),
]

SGTS = [
    Case(f"{field} {name}", lambda xp, change={field: value}: sgt(xp, **change), error, text)
    for field, name, value, error, text in [
        ("window_ptr", "2-D", [[0, 2, 3]], ShapeError, r"window_ptr has shape \(1, 3\)"),
        (
            "window_ptr",
            "short",
            [0, 3],
            ShapeError,
            r"\(2,\): give \(3,\), one per window and an end",
        ),
        ("window_ptr", "first", [1, 2, 3], FormatError, r"window_ptr\[0\] is 1: the first"),
        ("window_ptr", "falls", [0, 4, 3], FormatError, r"window_ptr decreases from 4 to 3 at pos"),
        ("window_ptr", "last", [0, 2, 2], FormatError, r"window_ptr\[-1\] is 2: the last .* be 3"),
        (
            "window_ptr",
            "moved",
            [0, 1, 3],
            FormatError,
            r"columns\[2, 0\] is 0: columns of a window",
        ),
        ("tile_ptr", "2-D", [[0, 2, 3, 4]], ShapeError, r"tile_ptr has shape \(1, 4\)"),
        (
            "tile_ptr",
            "short",
            [0, 2, 4],
            ShapeError,
            r"\(3,\): give \(4,\), one per tile and an end",
        ),
        ("tile_ptr", "first", [1, 2, 3, 4], FormatError, r"tile_ptr\[0\] is 1: the first pointer"),
        ("tile_ptr", "falls", [0, 3, 2, 4], FormatError, r"tile_ptr decreases from 3 to 2"),
        ("tile_ptr", "last", [0, 2, 3, 3], FormatError, r"tile_ptr\[-1\] is 3: the last .* be 4"),
        (
            "tile_ptr",
            "moved",
            [0, 1, 3, 4],
            FormatError,
            r"slots\[1\] lies in a tile column that is",
        ),
        (
            "columns",
            "1-D",
            [0, 1, 2, -1, 0, -1],
            ShapeError,
            r"columns has shape \(6,\): give \(n_ti",
        ),
        ("columns", "wide", [[0, 1, 2]], ShapeError, r"columns has shape \(1, 3\): .* width == 2"),
        (
            "columns",
            "few",
            [[0, 1], [2, -1]],
            ShapeError,
            r"tile_ptr has shape \(4,\): give \(3,\)",
        ),
        (
            "columns",
            "large",
            [[0, 1], [3, -1], [0, -1]],
            IndexRangeError,
            r"columns\[1, 0\] is 3 but",
        ),
        (
            "columns",
            "-2",
            [[0, 1], [2, -2], [0, -1]],
            IndexRangeError,
            r"columns\[1, 1\] is -2 but",
        ),
        ("columns", "swapped", [[1, 0], [2, -1], [0, -1]], FormatError, r"columns\[0, 1\] is 0: "),
        (
            "columns",
            "equal",
            [[0, 0], [2, -1], [0, -1]],
            FormatError,
            r"must ascend and be distinct",
        ),
        ("columns", "falls", [[0, 2], [1, -1], [0, -1]], FormatError, r"columns\[1, 0\] is 1: col"),
        ("columns", "early pad", [[0, -1], [2, -1], [0, -1]], FormatError, r"columns\[1, 0\] is 2"),
        ("columns", "first pad", [[0, 1], [-1, 2], [0, -1]], FormatError, r"columns\[1, 0\] is -1"),
        (
            "columns",
            "none",
            [[0, 1], [2, -1], [-1, -1]],
            FormatError,
            r"columns\[2, 0\] is -1: .*dding",
        ),
        (
            "slots",
            "2-D",
            [[0, 3, 0, 0]],
            ShapeError,
            r"slots has shape \(1, 4\): give \(4,\), one per",
        ),
        ("slots", "short", [0, 3, 0], ShapeError, r"slots has shape \(3,\): give \(4,\)"),
        ("slots", "large", [0, 4, 0, 0], IndexRangeError, r"slots\[1\] is 4 .* 4 cells in a tile"),
        (
            "slots",
            "padding",
            [0, 3, 1, 0],
            FormatError,
            r"slots\[2\] lies in a tile column that is pad",
        ),
        ("slots", "below", [0, 3, 0, 2], FormatError, r"slots\[3\] lies below the last row"),
        (
            "slots",
            "unsorted",
            [3, 0, 0, 0],
            FormatError,
            r"do not ascend by \(column, order\) .* 1: so",
        ),
        (
            "slots",
            "other row",
            [2, 3, 0, 0],
            FormatError,
            r"order puts a later row at place 0 than at 1",
        ),
        ("order", "2-D", [[0, 2, 1, 3]], ShapeError, r"order has shape \(1, 4\): give a 1-D array"),
        (
            "order",
            "short",
            [0, 2, 1],
            ShapeError,
            r"slots has shape \(4,\): give \(3,\), .* as in order",
        ),
        (
            "order",
            "large",
            [0, 2, 1, 4],
            IndexRangeError,
            r"order\[3\] is 4 but there are 4 entries",
        ),
        (
            "order",
            "negative",
            [0, 2, -1, 3],
            IndexRangeError,
            r"order\[2\] is -1 but there are 4 ent",
        ),
        (
            "order",
            "twice",
            [0, 2, 0, 3],
            FormatError,
            r"order never names 1: it must be a permutation",
        ),
        (
            "order",
            "other row",
            [0, 1, 2, 3],
            FormatError,
            r"order puts a later row at place 1 than at 2",
        ),
        (
            "data",
            "short",
            [1, 2, 3],
            ShapeError,
            r"data has shape \(3,\) but the structure stores \(4",
        ),
        ("tile", "0 rows", (0, 8), ShapeError, r"tile is \(0, 8\): sizes are positive"),
        ("tile", "negative", (16, -8), ShapeError, r"tile is \(16, -8\): sizes are positive"),
        ("tile", "large", (257, 256), ShapeError, r"tile is \(257, 256\): .* at most 65536 cells"),
        (
            "tile",
            "string",
            "16x8",
            ShapeError,
            r"tile is '16x8': give two integers \(height, width\)",
        ),
        ("tile", "one", (16,), ShapeError, r"tile is \(16,\): give two integers"),
        ("tile", "three", (1, 2, 3), ShapeError, r"tile is \(1, 2, 3\): give two integers"),
        ("tile", "float", (2.0, 2), ShapeError, r"tile is \(2\.0, 2\): give two integers"),
        ("tile", "None", None, ShapeError, r"tile is None: give two integers"),
        ("tile", "wider", (2, 3), ShapeError, r"columns has shape \(3, 2\): .* width == 3"),
        ("shape", "more rows", (5, 3), ShapeError, r"window_ptr has shape \(3,\): give \(4,\)"),
        (
            "shape",
            "fewer columns",
            (3, 2),
            IndexRangeError,
            r"columns\[1, 0\] is 2 but there are 2 col",
        ),
        ("shape", "negative", (-3, 3), ShapeError, r"shape is \(-3, 3\): sizes cannot be negative"),
    ]
]
SGTS += [
    Case(
        f"sgt {field} {dtype}",
        lambda xp, f=field, d=dtype: sgt(xp, **{f: array(xp, GOOD_SGT[f], d)}),
        DtypeError,
        text,
    )
    for field, dtype, text in [
        ("window_ptr", "int64", r"tile_ptr is int32 but window_ptr is int64: give both the same"),
        ("window_ptr", "float32", r"window_ptr\.dtype is float32: indices are"),
        ("columns", "int64", r"columns is int64 but window_ptr is int32: give both the same"),
        ("columns", "int16", r"columns\.dtype is int16: indices are int32 or int64"),
        ("tile_ptr", "int64", r"tile_ptr is int64 but window_ptr is int32"),
        ("order", "int64", r"order is int64 but window_ptr is int32"),
        ("order", "uint32", r"order\.dtype is uint32: indices are"),
        ("slots", "uint16", r"slots\.dtype is uint16 but tiles of \(2, 2\) .* uint8: cast"),
        ("slots", "int8", r"slots\.dtype is int8 but tiles of"),
        ("slots", "float32", r"slots\.dtype is float32 but tiles of"),
    ]
]
SGTS += [
    Case(
        "sgt data int",
        lambda xp: sgt(xp, data=xp.ones(4, np.int8)),
        DtypeError,
        r"data\.dtype is int8",
    ),
    Case(
        "sgt order None",
        lambda xp: sgt(xp, order=None),
        DtypeError,
        r"order is None: give an array",
    ),
    Case(
        "sgt too many entries",
        lambda xp: sgt(xp, order=huge(xp), slots=huge(xp, np.uint8)),
        IndexRangeError,
        r"with 2147483648 entries goes beyond int32",
    ),
]

CONVERSIONS = [
    Case(
        "unknown",
        lambda xp: good(xp).asformat("bsr"),
        UnsupportedError,
        r"format is 'bsr': use one of coo, csr, csc, sgt, cbsr, or \.toarray\(\)",
    ),
    Case(
        "no name",
        lambda xp: good(xp).asformat(None),
        UnsupportedError,
        r"format is None: use one of",
    ),
    Case(
        "perm", lambda xp: good(xp).asformat_with_perm("x"), UnsupportedError, r"format is 'x': use"
    ),
    Case(
        "tile on csc",
        lambda xp: good(xp).asformat("csc", tile=(16, 8)),
        UnsupportedError,
        r"tile is no option of 'csc': only \"sgt\" has one, tile",
    ),
    Case(
        "tile on csr",
        lambda xp: good(xp).asformat("csr", tile=(2, 2)),
        UnsupportedError,
        r"of 'csr'",
    ),
    Case(
        "unknown option",
        lambda xp: good(xp).asformat("sgt", width=8),
        UnsupportedError,
        r"width is no option of 'sgt': only \"sgt\" has one, tile",
    ),
    *(
        Case(
            f"{make.__name__} -> cbsr",
            lambda xp, make=make: make(xp).asformat("cbsr"),
            UnsupportedError,
            rf"{make.__name__} -> cbsr: a CBSR is made from dense features, by .*maxk\(X, k\)",
        )
        for make in (coo, csr, csc, sgt)
    ),
    Case(
        "tile 0",
        lambda xp: good(xp).tosgt((0, 8)),
        ShapeError,
        r"tile is \(0, 8\): sizes are posit",
    ),
    Case(
        "tile -1", lambda xp: good(xp).tosgt((8, -1)), ShapeError, r"tile is \(8, -1\): sizes are p"
    ),
    Case(
        "tile large", lambda xp: good(xp).tosgt((65536, 2)), ShapeError, r"at most 65536 cells, use"
    ),
    Case("tile string", lambda xp: good(xp).tosgt("16x8"), ShapeError, r"tile is '16x8': give two"),
    Case("tile int", lambda xp: good(xp).tosgt(16), ShapeError, r"tile is 16: give two integers"),
    Case(
        "tile None", lambda xp: coo(xp).tosgt(None), ShapeError, r"tile is None: give two integers"
    ),
    Case(
        "tile floats", lambda xp: csc(xp).tosgt((16.0, 8.0)), ShapeError, r"tile is \(16\.0, 8\.0\)"
    ),
    Case(
        "dense int", lambda xp: good(xp).toarray(int), DtypeError, r"dtype is int64: values are flo"
    ),
    Case(
        "dense complex", lambda xp: good(xp).toarray("complex64"), DtypeError, r"dtype is complex64"
    ),
    Case(
        "dense too large",
        lambda xp: coo(xp, index=np.int64, shape=(2**40, 2**40)).toarray(),
        OutOfMemoryError,
        r"a dense array of shape \(1099511627776, 1099511627776\) cannot be addressed: take a part",
    ),
    Case(
        "1-D",
        lambda xp: from_dense(xp.ones(3)),
        ShapeError,
        r"X has shape \(3,\): give a 2-D array",
    ),
    Case(
        "3-D",
        lambda xp: from_dense(xp.ones((1, 1, 1))),
        ShapeError,
        r"X has shape \(1, 1, 1\): give",
    ),
    Case(
        "int X",
        lambda xp: from_dense(xp.ones((1, 1), int)),
        DtypeError,
        r"X\.dtype is int64: values",
    ),
    Case(
        "bool X",
        lambda xp: from_dense(xp.ones((1, 1), bool)),
        DtypeError,
        r"X\.dtype is bool: values",
    ),
    Case("None", lambda xp: from_dense(None), DtypeError, r"X is None: give an array"),
    Case(
        "X to bsr",
        lambda xp: from_dense(xp.ones((1, 1)), "bsr"),
        UnsupportedError,
        r"format is 'bsr'",
    ),
    Case(
        "X to cbsr",
        lambda xp: from_dense(xp.ones((1, 1)), "cbsr"),
        UnsupportedError,
        r"maxk\(X, k\)",
    ),
    Case(
        "X index dtype",
        lambda xp: from_dense(xp.ones((1, 1)), index_dtype=np.uint32),
        DtypeError,
        r"index_dtype is uint32: indices are int32 or int64",
    ),
    Case(
        "X tile",
        lambda xp: from_dense(xp.ones((1, 1)), tile=(2, 2)),
        UnsupportedError,
        r"tile is no",
    ),
]

METHODS = [
    Case(
        "astype int",
        lambda xp: good(xp).astype(int),
        DtypeError,
        r"dtype is int64: values are float16",
    ),
    Case(
        "astype complex", lambda xp: good(xp).astype(complex), DtypeError, r"is complex128: values"
    ),
    Case(
        "astype name",
        lambda xp: good(xp).astype("float99"),
        DtypeError,
        r"'float99', which is no Num",
    ),
    Case(
        "astype object",
        lambda xp: good(xp).astype(object),
        DtypeError,
        r"dtype is object: values are",
    ),
    Case(
        "astype structure",
        lambda xp: good(xp).astype("f4,,"),
        DtypeError,
        r"'f4,,', which is no Num",
    ),
    Case(
        "astype names",
        lambda xp: good(xp).astype({"names": 1}),
        DtypeError,
        r"which is no NumPy dtyp",
    ),
    Case(
        "astype unweighted",
        lambda xp: csr(xp).astype(int),
        DtypeError,
        r"dtype is int64: values are",
    ),
    Case(
        "astype index",
        lambda xp: good(xp).astype(index_dtype=np.int16),
        DtypeError,
        r"index_dtype is int16: indices are int32 or int64",
    ),
    Case(
        "astype index float",
        lambda xp: csr(xp).astype(index_dtype=float),
        DtypeError,
        r"is float64: i",
    ),
    Case(
        "astype index name",
        lambda xp: csr(xp).astype(index_dtype="i9"),
        DtypeError,
        r"'i9', which is",
    ),
    Case(
        "lossy rows",
        lambda xp: coo(xp, index=np.int64, shape=(2**31, 2)).astype(index_dtype=np.int32),
        IndexRangeError,
        r"shape \(2147483648, 2\) with 2 entries goes beyond int32 .*: use int64 indices",
    ),
    Case(
        "lossy columns",
        lambda xp: COO(xp.zeros(1, np.int64), xp.full(1, 2**40, np.int64), shape=(1, 2**41)).astype(
            index_dtype=np.int32
        ),
        IndexRangeError,
        r"shape \(1, 2199023255552\) with 1 entries goes beyond int32",
    ),
    Case(
        "lossy entries",
        lambda xp: COO._trusted(
            row=huge(xp, np.int64), col=huge(xp, np.int64), data=None, shape=(1, 1)
        ).astype(index_dtype=np.int32),
        IndexRangeError,
        r"with 2147483648 entries goes beyond int32",
    ),
    Case(
        "with_data short",
        lambda xp: good(xp).with_data([1.0]),
        ShapeError,
        r"data has shape \(1,\)",
    ),
    Case(
        "with_data int",
        lambda xp: good(xp).with_data(xp.ones(2, int)),
        DtypeError,
        r"dtype is int64",
    ),
    Case(
        "with_data 2-D", lambda xp: good(xp).with_data(xp.ones((2, 1))), ShapeError, r"\(2, 1\) but"
    ),
    Case(
        "check level", lambda xp: good(xp).check("deep"), UnsupportedError, r"level is 'deep': use"
    ),
    Case(
        "to gpu",
        lambda xp: good(xp).to("gpu"),
        DeviceError,
        r"device is 'gpu': use \"cpu\", \"cuda\"",
    ),
    Case("to cpu:0", lambda xp: good(xp).to("cpu:0"), DeviceError, r"device is 'cpu:0': use"),
    Case("to cuda:", lambda xp: good(xp).to("cuda:"), DeviceError, r"device is 'cuda:': use"),
    Case("to cuda:x", lambda xp: good(xp).to("cuda:x"), DeviceError, r"device is 'cuda:x': use"),
    Case("to cuda:-1", lambda xp: good(xp).to("cuda:-1"), DeviceError, r"device is 'cuda:-1': use"),
    Case("to None", lambda xp: good(xp).to(None), DeviceError, r"device is None: use \"cpu\""),
    Case("to 0", lambda xp: good(xp).to(0), DeviceError, r"device is 0: use \"cpu\""),
]

KEYS = [
    Case(f"[{name}]", lambda xp, key=key: good(xp)[key(xp)], error, text)
    for name, key, error, text in [
        ("0", lambda xp: 0, UnsupportedError, r"rows: 0 is one place; use the slice 0:1"),
        (
            "int64",
            lambda xp: np.int64(1),
            UnsupportedError,
            r"rows: 1 is one place; use the slice 1:2",
        ),
        ("0, 0", lambda xp: (0, 0), UnsupportedError, r"rows: 0 is one place"),
        (
            ":, 1",
            lambda xp: (slice(None), 1),
            UnsupportedError,
            r"columns: 1 is one place; use the sl",
        ),
        ("0.5", lambda xp: 0.5, DtypeError, r"rows: 0\.5 chooses none; use a slice, a mask or 1-D"),
        ("True", lambda xp: True, DtypeError, r"rows: True chooses none"),
        ("None", lambda xp: None, DtypeError, r"rows: None chooses none"),
        ("...", lambda xp: ..., DtypeError, r"rows: Ellipsis chooses none"),
        ("string", lambda xp: "row", DtypeError, r"rows: 'row' chooses none"),
        (
            "0:0.5",
            lambda xp: slice(0, 0.5),
            DtypeError,
            r"rows: slice\(0, 0\.5, None\) is no slice of in",
        ),
        (
            "::0",
            lambda xp: slice(None, None, 0),
            DtypeError,
            r"no slice of integers \(slice step cann",
        ),
        (
            "floats",
            lambda xp: xp.ones(2),
            DtypeError,
            r"rows: the key has dtype float64 and shape \(2",
        ),
        (
            "2-D",
            lambda xp: xp.ones((1, 1), int),
            DtypeError,
            r"dtype int64 and shape \(1, 1\); use a sl",
        ),
        (
            "short mask",
            lambda xp: xp.ones(1, bool),
            ShapeError,
            r"rows: the mask has 1 places for 2 rows; give one for each",
        ),
        (
            "long mask",
            lambda xp: (slice(None), xp.ones(9, bool)),
            ShapeError,
            r"has 9 places for 2 col",
        ),
        (
            "2",
            lambda xp: xp.asarray([2]),
            IndexRangeError,
            r"rows: the key goes from 2 to 2 but there are 2 rows; use -2 to 1",
        ),
        (
            "-3",
            lambda xp: xp.asarray([0, -3]),
            IndexRangeError,
            r"rows: the key goes from -3 to 0 but",
        ),
        (
            ":, 7",
            lambda xp: (slice(None), xp.asarray([7])),
            IndexRangeError,
            r"columns: .* 7 to 7 but",
        ),
        (
            "three",
            lambda xp: (slice(1), slice(1), slice(1)),
            ShapeError,
            r"got 3 keys: .* give two",
        ),
        (
            "2**63",
            lambda xp: xp.full(1, 2**63, np.uint64),
            IndexRangeError,
            r"from 9223372036854775808",
        ),
    ]
]

CASES = SHAPES + COOS + COMPRESSED + CBSRS + SGTS + CONVERSIONS + METHODS + KEYS


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_is_refused(xp, case):
    refuse(case, xp)


# What only NumPy can hold: objects, strings, dates, masked arrays, nested lists.

ONLY_NUMPY = [
    Case(
        "row objects",
        lambda _: coo(np, row=np.array([0, None])),
        DtypeError,
        r"row holds Python obj",
    ),
    Case(
        "row ragged",
        lambda _: COO([[0], [1, 2]], [0], shape=(2, 2)),
        ShapeError,
        r"row is no array",
    ),
    Case(
        "row strings", lambda _: coo(np, row=np.array(["0", "1"])), DtypeError, r"row\.dtype is <U1"
    ),
    Case(
        "row text", lambda _: coo(np, row="01"), ShapeError, r"row has shape \(\): give a 1-D array"
    ),
    Case(
        "row dates",
        lambda _: coo(np, row=np.zeros(2, "M8[s]")),
        DtypeError,
        r"is datetime64\[s\]: ind",
    ),
    Case(
        "row set",
        lambda _: coo(np, row={0, 1}),
        DtypeError,
        r"row holds Python objects \(dtype object",
    ),
    Case(
        "row too long",
        lambda _: COO([2**70], [0], shape=(2, 2)),
        DtypeError,
        r"row holds Python obj",
    ),
    Case(
        "indices objects",
        lambda _: csr(np, indices=np.array([1, "x"], object)),
        DtypeError,
        r"indices",
    ),
    Case(
        "row masked",
        lambda _: coo(np, row=np.ma.array([0, 1])),
        UnsupportedError,
        r"row is a masked a",
    ),
    Case(
        "data objects",
        lambda _: coo(np, data=np.array([1, None])),
        DtypeError,
        r"data holds Python",
    ),
    Case(
        "data strings",
        lambda _: coo(np, data=np.array(["a", "b"])),
        DtypeError,
        r"data\.dtype is <U1",
    ),
    Case(
        "data dates",
        lambda _: coo(np, data=np.zeros(2, "m8[s]")),
        DtypeError,
        r"data\.dtype is timed",
    ),
    Case(
        "data record",
        lambda _: coo(np, data=np.zeros(2, "f4,f4")),
        DtypeError,
        r"data\.dtype is \[",
    ),
    Case(
        "data long double",
        lambda _: coo(np, data=np.zeros(2, "g")),
        DtypeError,
        r"values are float16",
    ),
    Case(
        "data ints",
        lambda _: coo(np).with_data(np.array([1, 2])),
        DtypeError,
        r"data\.dtype is int64",
    ),
    Case(
        "X objects", lambda _: from_dense(np.array([[None]])), DtypeError, r"X holds Python objects"
    ),
    Case(
        "X ragged",
        lambda _: from_dense([[1.0], [1.0, 2.0]]),
        ShapeError,
        r"X is no array .*: give rows",
    ),
    Case("X masked", lambda _: from_dense(np.ma.ones((1, 1))), UnsupportedError, r"X\.filled\(0\)"),
    Case(
        "X strings", lambda _: from_dense(np.array([["a"]])), DtypeError, r"X\.dtype is <U1: values"
    ),
    Case("key objects", lambda _: good(np)[[None]], DtypeError, r"rows holds Python objects"),
    Case("key ragged", lambda _: good(np)[[[0], [0, 1]]], ShapeError, r"rows is no array"),
]


@pytest.mark.parametrize("case", ONLY_NUMPY, ids=[case.name for case in ONLY_NUMPY])
def test_what_only_numpy_holds_is_refused(case):
    refuse(case, np)


def torch_tensors() -> dict[str, tuple[Callable[[Any], Any], type[SparseFmtError], str]]:
    return {
        "requires grad": (
            lambda t: t.ones(2, requires_grad=True),
            DtypeError,
            r"Tensor .*: detach it",
        ),
        "bfloat16": (lambda t: t.ones(2, dtype=t.bfloat16), DtypeError, r"dtype that numpy has"),
        "conjugate": (
            lambda t: t.ones(2, dtype=t.complex64).conj(),
            DtypeError,
            r"numpy cannot take",
        ),
        "sparse": (lambda t: t.eye(2).to_sparse(), DtypeError, r"data: numpy .*: .*make it dense"),
        "meta": (lambda t: t.ones(2, device="meta"), DeviceError, r"data has no memory to share"),
        "integer": (
            lambda t: t.ones(2, dtype=t.int32),
            DtypeError,
            r"data\.dtype is int32: values",
        ),
    }


@pytest.mark.parametrize("name", torch_tensors())
def test_a_tensor_that_numpy_cannot_share_is_refused(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    build, error, text = torch_tensors()[name]
    refuse(Case(name, lambda xp: coo(xp, data=build(torch)), error, text), np)


def test_an_array_on_a_foreign_device_is_refused():
    class Tensor:
        def __dlpack_device__(self):
            return 10, 0  # ROCm

    refuse(
        Case("", lambda xp: coo(xp, row=Tensor()), DeviceError, r"row lives on DLPack device \(10"),
        np,
    )


# Devices

PAIRS = [
    (coo, "col", r"col is on cuda:7 but row is on cpu: move one of them"),
    (coo, "data", r"data is on cuda:7 but the index array is on cpu: move"),
    (csr, "indices", r"indices is on cuda:7 but indptr is on cpu: move"),
    (csr, "data", r"data is on cuda:7 but the index array is on cpu"),
    (cbsr, "data", r"data is on cuda:7 but the index array is on cpu"),
    (sgt, "tile_ptr", r"tile_ptr is on cuda:7 but window_ptr is on cpu"),
    (sgt, "columns", r"columns is on cuda:7 but window_ptr is on cpu"),
    (sgt, "slots", r"slots is on cuda:7 but window_ptr is on cpu"),
    (sgt, "order", r"order is on cuda:7 but window_ptr is on cpu"),
    (sgt, "data", r"data is on cuda:7 but the index array is on cpu"),
]


def stored(make: Any, field: str, xp: ModuleType) -> Any:
    data = {"data": [1, 2, 3, 4]} if make is sgt else {} if make is cbsr else {"data": [1, 2]}
    return getattr(make(xp, **data), field)


@pytest.mark.parametrize(("make", "field", "text"), PAIRS)
def test_arrays_on_different_devices_are_refused(monkeypatch, make, field, text):
    """Simulated: one array says that it lives elsewhere."""
    away = stored(make, field, np)
    monkeypatch.setattr(checks, "device_of", lambda a: "cuda:7" if a is away else "cpu")
    with pytest.raises(DeviceError, match=text):
        make(np, **{field: away})


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "field", "text"), PAIRS)
def test_arrays_on_host_and_device_are_refused(make, field, text):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    text = text.replace("cuda:7", "cpu").replace("is on cpu: ", "is on cuda:0: ")
    with pytest.raises(DeviceError, match=r"is on (cpu|cuda:0) but .* is on (cpu|cuda:0)"):
        make(cupy, **{field: stored(make, field, np)})


@pytest.mark.gpu
def test_a_key_on_another_device_is_refused():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    with pytest.raises(DeviceError, match=r"rows is on cpu but the matrix is on cuda:0: move"):
        good(cupy)[np.array([0])]


def test_a_device_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = r"CuPy is not installed: pip install 'sparsefmt\[cuda13\]' \(or \[cuda12\]\)"
    refuse(Case("", lambda xp: good(xp).to("cuda"), DeviceError, text), np)


class CUDARuntimeError(RuntimeError):
    pass


def cuda_with(devices: int) -> SimpleNamespace:
    """A CuPy that finds so many devices."""

    def count() -> int:
        if not devices:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return devices

    runtime = SimpleNamespace(
        getDeviceCount=count, getDevice=lambda: 0, CUDARuntimeError=CUDARuntimeError
    )
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), ndarray=type("ndarray", (), {}))


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cuda_with(0))
    with pytest.raises(
        DeviceError, match=r"device is 'cuda' but CUDA finds no device: cudaErrorNoDev"
    ):
        good(np).to("cuda")
    monkeypatch.setitem(sys.modules, "cupy", cuda_with(2))
    text = r"device is 'cuda:99' but there are 2 CUDA devices: count from 0"
    refuse(Case("", lambda xp: good(xp).to("cuda:99"), DeviceError, text), np)
    assert formats_arrays.parse_device("cuda:1") == 1
    assert formats_arrays.parse_device("cuda") == 0


# Sizes beyond the index dtype

TOO_MANY = {
    "coo": lambda: COO(huge(np), huge(np), shape=(1, 1)),
    "csr": lambda: csr(np, indices=huge(np)),
    "csc": lambda: csc(np, indices=huge(np), data=huge(np, np.float32)),
    "sgt": lambda: sgt(np, order=huge(np), slots=huge(np, np.uint8)),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_entries_are_refused_before_anything_is_allocated(name):
    tracemalloc.start()
    try:
        with pytest.raises(IndexRangeError, match="goes beyond int32"):
            TOO_MANY[name]()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_rows_chosen_too_often_are_refused(xp):
    A = csr(xp, indptr=[0, 1 << 20], indices=xp.zeros(1 << 20, np.int32), shape=(1, 1))
    with pytest.raises(IndexRangeError, match=r"2048 rows or columns hold 2147483648 entries, bey"):
        A[xp.zeros(2048, np.int32)]


@pytest.mark.parametrize("name", ["csr", "csc", "sgt"])
def test_a_pointer_array_too_large_for_memory_is_an_out_of_memory_error(xp, name):
    A = COO(xp.zeros(1, np.int64), xp.zeros(1, np.int64), shape=(1 << 52, 1 << 52))
    with pytest.raises(
        OutOfMemoryError, match=r"coo -> .* of 1 entries: .*Free arrays or use a sm"
    ):
        A.asformat(name)
    assert A.T.nnz == 1  # the process works on


def test_an_allocation_error_is_reported_once():
    with pytest.raises(OutOfMemoryError, match=r"^inner: full\. Free arrays") as caught:
        with formats_arrays.allocating("outer"), formats_arrays.allocating("inner"):
            raise MemoryError("full.")
    assert isinstance(caught.value, MemoryError)


# The tree

BUILT_IN = {
    FormatError: ValueError,
    ShapeError: ValueError,
    DtypeError: TypeError,
    IndexRangeError: IndexError,
    DeviceError: RuntimeError,
    UnsupportedError: NotImplementedError,
    FileFormatError: ValueError,
    OutOfMemoryError: MemoryError,
    KernelLaunchError: RuntimeError,
    RankError: RuntimeError,
}


@pytest.mark.parametrize("error", BUILT_IN, ids=lambda error: error.__name__)
def test_every_error_is_the_built_in_that_fits_and_public(error):
    assert issubclass(error, SparseFmtError)
    assert issubclass(error, BUILT_IN[error])
    assert error.__doc__
    assert getattr(sparsefmt, error.__name__) is error


def test_there_are_enough_cases():
    assert len(CASES) + len(ONLY_NUMPY) + len(torch_tensors()) + len(PAIRS) >= 120


def test_a_refused_conversion_leaves_its_input_alone(xp):
    A = good(xp)
    before = A.copy()
    with pytest.raises(UnsupportedError):
        convert.to_format(A, "cbsr")
    assert A == before
