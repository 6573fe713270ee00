"""Bad input is refused by class and by a text that names the argument, its value and the mend."""

import re
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

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


Build = Callable[[ModuleType], Any]
#: A class of errors, the texts that have it (regular expressions), and what is refused so.
Refusals = dict[type[SparseFmtError], dict[str, Build]]


def refuse(error: type[SparseFmtError], text: str, build: Build, xp: ModuleType = np) -> None:
    with pytest.raises(error, match=text) as caught:
        build(xp)
    assert type(caught.value) is error
    assert str(caught.value).endswith((".", ".)"))
    assert MEND.search(str(caught.value)), str(caught.value)


def changed(make: Any, field: str, value: Any) -> Build:
    """Build with another value of one argument; NumPy's arrays go to the device."""
    if isinstance(value, np.ndarray):
        return lambda xp: make(xp, **{field: xp.asarray(value)})
    return partial(make, **{field: value})


def rows_of(*tables: Refusals) -> list[tuple[type[SparseFmtError], str, Build]]:
    return [
        (error, text, build)
        for table in tables
        for error, builds in table.items()
        for text, build in builds.items()
    ]


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
    ((True, 2), ShapeError, r"shape is \(True, 2\): give two integers"),
    ((2**62, 2), IndexRangeError, r"shape is \(4611686018427387904, 2\): sizes go to 115"),
    ((2**31, 2), IndexRangeError, r"\(2147483648, 2\) with 2 entries .* int32 .* int64"),
    ((2, 2**31), IndexRangeError, r"\(2, 2147483648\) with 2 entries .* int32 .* int64"),
]

#: What is wrong with one argument of each: its value, the error, and the text.
WRONG: dict[Any, list[tuple[str, Any, type[SparseFmtError], str]]] = {
    coo: [
        *(("shape", shape, error, text) for shape, error, text in SHAPES),
        ("row", [[0, 1]], ShapeError, r"row has shape \(1, 2\): give a 1"),
        ("col", np.int32(1), ShapeError, r"col has shape \(\): give a 1"),
        ("col", [1, 0, 1], ShapeError, r"col has shape \(3,\): give \(2,\), row .*same entries"),
        ("row", [], ShapeError, r"col has shape \(2,\): give \(0,\)"),
        ("data", [1, 2, 3], ShapeError, r"data has shape \(3,\) but .* \(2,\): give one value per"),
        ("data", [[1], [2]], ShapeError, r"data has shape \(2, 1\)"),
        ("data", np.float32(1), ShapeError, r"data has shape \(\)"),
        ("row", [0, -1], IndexRangeError, r"row\[1\] is -1 but there are 2 rows: use 0 to 1"),
        ("row", [2, 0], IndexRangeError, r"row\[0\] is 2 .* 2 rows"),
        ("col", [0, -7], IndexRangeError, r"col\[1\] is -7"),
        ("col", [9, 9], IndexRangeError, r"col\[0\] is 9 .* 2 columns"),
        ("index", np.float32, DtypeError, r"row\.dtype is float32: indices are int32 .*cast"),
        ("index", bool, DtypeError, r"row\.dtype is bool: indices are"),
        ("index", np.uint32, DtypeError, r"row\.dtype is uint32"),
        ("index", np.int16, DtypeError, r"row\.dtype is int16"),
        ("index", np.complex64, DtypeError, r"is complex64: indices"),
        ("col", np.zeros(2, np.int64), DtypeError, r"col is int64 but row is int32: give both"),
        ("data", np.ones(2, int), DtypeError, r"data\.dtype is int64: values .* float16, .*cast"),
        ("data", np.ones(2, bool), DtypeError, r"dtype is bool: values"),
        ("data", np.ones(2, np.complex64), DtypeError, r"data\.dtype is complex64: values are"),
        ("data", np.ones(2, np.uint8), DtypeError, r"is uint8: values"),
        ("row", None, DtypeError, r"row is None: give an array"),
        ("validate", "none", UnsupportedError, r"validate is 'none': use \"full\" or \"cheap\""),
        ("validate", None, UnsupportedError, r"validate is None"),
    ],
    csr: [
        ("indptr", [[0, 1, 2]], ShapeError, r"indptr has shape \(1, 3"),
        ("indices", [[1, 0]], ShapeError, r"indices has shape \(1, 2"),
        ("indptr", [0, 2], ShapeError, r"indptr has shape \(2,\): give \(3,\), one per row and"),
        ("indptr", [0, 1, 2, 2], ShapeError, r"shape \(4,\): give \(3"),
        ("indptr", [], ShapeError, r"indptr has shape \(0,\)"),
        ("data", [1], ShapeError, r"data has shape \(1,\) but the struc"),
        ("indptr", None, DtypeError, r"indptr is None: give an arr"),
        ("indptr", np.zeros(3), DtypeError, r"indptr\.dtype is float64: indices are int32 or"),
        ("indptr", np.zeros(3, np.uint64), DtypeError, r"is uint64"),
        ("indices", np.zeros(2, bool), DtypeError, r"indices\.dtype"),
        ("indices", np.zeros(2, np.int8), DtypeError, r"is int8: ind"),
        ("indices", np.zeros(2, np.int64), DtypeError, r"is int64 but indptr is int32: give both"),
        ("data", np.ones(2, np.int32), DtypeError, r"data\.dtype is int32"),
        ("indptr", [1, 1, 2], FormatError, r"indptr\[0\] is 1: the first pointer must be 0"),
        ("indptr", [-1, 1, 2], FormatError, r"indptr\[0\] is -1"),
        ("indptr", [0, 3, 2], FormatError, r"indptr decreases from 3 to 2 at .* 2: pointers must"),
        ("indptr", [0, -1, 2], FormatError, r"indptr decreases from 0 to -1 at position 1"),
        ("indptr", [0, 1, 1], FormatError, r"indptr\[-1\] is 1: the last pointer must be 2"),
        ("indptr", [0, 1, 9], FormatError, r"indptr\[-1\] is 9"),
        ("indices", [1, -1], IndexRangeError, r"\[1\] is -1 but .* 2 columns: use 0 to 1, or"),
        ("indices", [2, 5], IndexRangeError, r"indices\[0\] is 2 but"),
        ("validate", True, UnsupportedError, r"validate is True: use"),
    ],
    csc: [
        ("shape", (2, 3), ShapeError, r"indptr has shape \(3,\): give \(4,\), one per column and"),
        ("indptr", [0, 2, 1], FormatError, r"indptr decreases"),
        ("indptr", [0, 0, 0], FormatError, r"indptr\[-1\] is 0: the last"),
        ("indices", [0, 2], IndexRangeError, r"\[1\] is 2 .* 2 rows"),
        ("indices", [-2, 0], IndexRangeError, r"\[0\] is -2"),
        ("shape", (2**31, 2), IndexRangeError, r"beyond int32"),
    ],
    cbsr: [
        ("indices", [[0, 2], [1, 1]], FormatError, r"\[1, 0:2\] is \[1, 1\]: .* ascend and be di"),
        ("indices", [[2, 0], [1, 2]], FormatError, r"\[0, 0:2\] is \[2, 0"),
        ("indices", [[0, 2], [1, 3]], IndexRangeError, r"\[1, 1\] is 3 .* 3 columns: use 0 to 2"),
        ("shape", (2, 2**31), IndexRangeError, r"2147483648\) .* int32"),
        ("shape", (2, 1), ShapeError, r"k is 2 .* a row has 1 columns"),
        ("shape", (2, 0), ShapeError, r"k is 2 .* a row has 0 columns"),
        ("indices", [0, 2], ShapeError, r"indices has shape \(2,\): give \(n_rows, k\) .*== 2"),
        ("indices", [[[0, 2]]], ShapeError, r"indices has shape \(1, 1, 2\)"),
        ("shape", (3, 3), ShapeError, r"\(2, 2\): .* n_rows == 3"),
        ("data", [1, 2], ShapeError, r"data has shape \(2,\) .* \(2, 2\)"),
        ("index", np.int32, DtypeError, r"\.dtype is int32 but 3 .* as uint8: cast"),
        ("index", np.uint16, DtypeError, r"uint16 but 3 columns"),
        ("index", np.float32, DtypeError, r"is float32 but 3 columns"),
        ("shape", (2, 257), DtypeError, r"uint8 but 257 .* stored as uint16"),
        ("data", None, DtypeError, r"data is None: a CBSR holds features"),
        ("data", np.ones((2, 2), np.int32), DtypeError, r"data\.dtype is int32: values are"),
    ],
    sgt: [
        ("window_ptr", [[0, 2, 3]], ShapeError, r"window_ptr has shape \(1, 3\)"),
        ("window_ptr", [0, 3], ShapeError, r"\(2,\): give \(3,\), one per window and an end"),
        ("window_ptr", [1, 2, 3], FormatError, r"window_ptr\[0\] is 1: the first"),
        ("window_ptr", [0, 4, 3], FormatError, r"window_ptr decreases from 4 to 3 at pos"),
        ("window_ptr", [0, 2, 2], FormatError, r"window_ptr\[-1\] is 2: the last .* be 3"),
        ("window_ptr", [0, 1, 3], FormatError, r"columns\[2, 0\] is 0: columns of a window"),
        ("tile_ptr", [[0, 2, 3, 4]], ShapeError, r"tile_ptr has shape \(1, 4\)"),
        ("tile_ptr", [0, 2, 4], ShapeError, r"\(3,\): give \(4,\), one per tile and an end"),
        ("tile_ptr", [1, 2, 3, 4], FormatError, r"tile_ptr\[0\] is 1: the first pointer"),
        ("tile_ptr", [0, 3, 2, 4], FormatError, r"tile_ptr decreases from 3 to 2"),
        ("tile_ptr", [0, 2, 3, 3], FormatError, r"tile_ptr\[-1\] is 3: the last .* be 4"),
        ("tile_ptr", [0, 1, 3, 4], FormatError, r"slots\[1\] lies in a tile column that is"),
        ("columns", [0, 1, 2, -1, 0, -1], ShapeError, r"columns has shape \(6,\): give \(n_ti"),
        ("columns", [[0, 1, 2]], ShapeError, r"columns has shape \(1, 3\): .* width == 2"),
        ("columns", [[0, 1], [2, -1]], ShapeError, r"tile_ptr has shape \(4,\): give \(3,\)"),
        ("columns", [[0, 1], [3, -1], [0, -1]], IndexRangeError, r"columns\[1, 0\] is 3 but"),
        ("columns", [[0, 1], [2, -2], [0, -1]], IndexRangeError, r"columns\[1, 1\] is -2 but"),
        ("columns", [[1, 0], [2, -1], [0, -1]], FormatError, r"columns\[0, 1\] is 0: "),
        ("columns", [[0, 0], [2, -1], [0, -1]], FormatError, r"must ascend and be distinct"),
        ("columns", [[0, 2], [1, -1], [0, -1]], FormatError, r"columns\[1, 0\] is 1: col"),
        ("columns", [[0, -1], [2, -1], [0, -1]], FormatError, r"columns\[1, 0\] is 2"),
        ("columns", [[0, 1], [-1, 2], [0, -1]], FormatError, r"columns\[1, 0\] is -1"),
        ("columns", [[0, 1], [2, -1], [-1, -1]], FormatError, r"columns\[2, 0\] is -1: .*dding"),
        ("slots", [[0, 3, 0, 0]], ShapeError, r"slots has shape \(1, 4\): give \(4,\), one per"),
        ("slots", [0, 3, 0], ShapeError, r"slots has shape \(3,\): give \(4,\)"),
        ("slots", [0, 4, 0, 0], IndexRangeError, r"slots\[1\] is 4 .* 4 cells in a tile"),
        ("slots", [0, 3, 1, 0], FormatError, r"slots\[2\] lies in a tile column that is pad"),
        ("slots", [0, 3, 0, 2], FormatError, r"slots\[3\] lies below the last row"),
        ("slots", [3, 0, 0, 0], FormatError, r"do not ascend by \(column, order\) .* 1: so"),
        ("slots", [2, 3, 0, 0], FormatError, r"order puts a later row at place 0 than at 1"),
        ("order", [[0, 2, 1, 3]], ShapeError, r"order has shape \(1, 4\): give a 1-D array"),
        ("order", [0, 2, 1], ShapeError, r"slots has shape \(4,\): give \(3,\), .* as in order"),
        ("order", [0, 2, 1, 4], IndexRangeError, r"order\[3\] is 4 but there are 4 entries"),
        ("order", [0, 2, -1, 3], IndexRangeError, r"order\[2\] is -1 but there are 4 ent"),
        ("order", [0, 2, 0, 3], FormatError, r"order never names 1: it must be a permutation"),
        ("order", [0, 1, 2, 3], FormatError, r"order puts a later row at place 1 than at 2"),
        ("data", [1, 2, 3], ShapeError, r"data has shape \(3,\) but the structure stores \(4"),
        ("tile", (0, 8), ShapeError, r"tile is \(0, 8\): sizes are positive"),
        ("tile", (16, -8), ShapeError, r"tile is \(16, -8\): sizes are positive"),
        ("tile", (257, 256), ShapeError, r"tile is \(257, 256\): .* at most 65536 cells"),
        ("tile", "16x8", ShapeError, r"tile is '16x8': give two integers \(height, width\)"),
        ("tile", (16,), ShapeError, r"tile is \(16,\): give two integers"),
        ("tile", (1, 2, 3), ShapeError, r"tile is \(1, 2, 3\): give two integers"),
        ("tile", (2.0, 2), ShapeError, r"tile is \(2\.0, 2\): give two integers"),
        ("tile", (True, 2), ShapeError, r"tile is \(True, 2\): give two integers"),
        ("tile", None, ShapeError, r"tile is None: give two integers"),
        ("tile", (2, 3), ShapeError, r"columns has shape \(3, 2\): .* width == 3"),
        ("shape", (5, 3), ShapeError, r"window_ptr has shape \(3,\): give \(4,\)"),
        ("shape", (3, 2), IndexRangeError, r"columns\[1, 0\] is 2 but there are 2 col"),
        ("shape", (-3, 3), ShapeError, r"shape is \(-3, 3\): sizes cannot be negative"),
    ],
}
SGTS_DTYPES = [
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

MORE: Refusals = {
    FormatError: {
        r"indptr\[-1\] is 1: the last pointer must be 0": lambda xp: csr(xp, [0, 0, 1], []),
        r"indices\[0, 2:4\] is \[3, 2\]: columns of a row must ascend": lambda xp: cbsr(
            xp, [[0, 1, 3, 2]], [[1, 2, 3, 4]], (1, 4)
        ),
    },
    IndexRangeError: {
        r"is 0 but there are 0 rows: store no ent": lambda xp: coo(xp, [0], [0], shape=(0, 1)),
        r"beyond int32 \(at most 2147483647\): use int64 indices": lambda xp: COO(
            huge(xp), huge(xp), shape=(1, 1)
        ),
        r"with 2147483648 entries .* int32 .* use": lambda xp: csr(xp, indices=huge(xp)),
        r"indices\[0, 0\] is -1 but there are 70000 columns": lambda xp: cbsr(
            xp, [[-1]], [[1]], (1, 70000), np.int32
        ),
        r"with 2147483648 entries goes beyond int32": lambda xp: sgt(
            xp, order=huge(xp), slots=huge(xp, np.uint8)
        ),
    },
    ShapeError: {
        r"k is 0 .* a row has 3 columns: k lies between 1 and n_cols": lambda xp: cbsr(
            xp, xp.zeros((2, 0), np.uint8), xp.zeros((2, 0), np.float32)
        ),
    },
    DtypeError: {
        r"uint16 but 65537 .* as int32": lambda xp: cbsr(xp, shape=(2, 65537), index=np.uint16),
        r"int64 but 70000 .* as int32": lambda xp: cbsr(xp, shape=(2, 70000), index=np.int64),
        r"'nope', which is no NumPy dtype": lambda xp: cbsr(xp).astype(index_dtype="nope"),
        r"data is None": lambda xp: cbsr(xp).with_data(None),
        r"data\.dtype is int8": lambda xp: sgt(xp, data=xp.ones(4, np.int8)),
        r"order is None: give an array": lambda xp: sgt(xp, order=None),
    },
    UnsupportedError: {
        r"3 columns .* uint8: use \.tocsr": lambda xp: cbsr(xp).astype(index_dtype=np.int64),
        r"columns: .* use A\.tocsr\(\)\[": lambda xp: cbsr(xp)[:, :1],
    },
}

CONVERSIONS = {
    UnsupportedError: {
        r"'bsr': use one of coo, .*cbsr, or \.toarray\(\)": lambda xp: good(xp).asformat("bsr"),
        r"format is None: use one of": lambda xp: good(xp).asformat(None),
        r"format is 'x': use": lambda xp: good(xp).asformat_with_perm("x"),
        r"of 'csc': only \"sgt\" has one, tile": lambda xp: good(xp).asformat("csc", tile=(16, 8)),
        r"of 'coo'": lambda xp: good(xp).asformat("coo", tile=(8, 8)),
        r"of 'csr'": lambda xp: good(xp).asformat("csr", tile=(2, 2)),
        r"width is no option of 'sgt': only": lambda xp: good(xp).asformat("sgt", width=8),
        r"format is 'bsr'": lambda xp: from_dense(xp.ones((1, 1)), "bsr"),
        r"maxk\(X, k\)": lambda xp: from_dense(xp.ones((1, 1)), "cbsr"),
        r"tile is no": lambda xp: from_dense(xp.ones((1, 1)), tile=(2, 2)),
    },
    ShapeError: {
        r"tile is \(0, 8\): sizes are posit": lambda xp: good(xp).tosgt((0, 8)),
        r"tile is \(8, -1\): sizes are p": lambda xp: good(xp).tosgt((8, -1)),
        r"at most 65536 cells, use": lambda xp: good(xp).tosgt((65536, 2)),
        r"tile is '16x8': give two": lambda xp: good(xp).tosgt("16x8"),
        r"tile is \(8,\): give two integers": lambda xp: good(xp).tosgt((8,)),
        r"tile is 16: give two integers": lambda xp: good(xp).tosgt(16),
        r"tile is None: give two integers": lambda xp: coo(xp).tosgt(None),
        r"tile is \(16\.0, 8\.0\)": lambda xp: csc(xp).tosgt((16.0, 8.0)),
        r"X has shape \(3,\): give a 2-D array": lambda xp: from_dense(xp.ones(3)),
        r"X has shape \(1, 1, 1\): give": lambda xp: from_dense(xp.ones((1, 1, 1))),
    },
    DtypeError: {
        r"dtype is int64: values are flo": lambda xp: good(xp).toarray(int),
        r"dtype is complex64": lambda xp: good(xp).toarray("complex64"),
        r"X\.dtype is int64: values": lambda xp: from_dense(xp.ones((1, 1), int)),
        r"X\.dtype is bool: values": lambda xp: from_dense(xp.ones((1, 1), bool)),
        r"X is None: give an array": lambda xp: from_dense(None),
        r"is uint32: indices": lambda xp: from_dense(xp.ones((1, 1)), index_dtype=np.uint32),
    },
    OutOfMemoryError: {
        r"a dense array of shape \(1099511627776, 1099511627776\) "
        r"cannot be addressed: take a part": lambda xp: coo(
            xp, index=np.int64, shape=(2**40, 2**40)
        ).toarray(),
    },
}

METHODS = {
    DtypeError: {
        r"dtype is int64: values are float16": lambda xp: good(xp).astype(int),
        r"is complex128: values": lambda xp: good(xp).astype(complex),
        r"'float99', which is no Num": lambda xp: good(xp).astype("float99"),
        r"dtype is object: values are": lambda xp: good(xp).astype(object),
        r"'f4,,', which is no Num": lambda xp: good(xp).astype("f4,,"),
        r"which is no NumPy dtyp": lambda xp: good(xp).astype({"names": 1}),
        r"dtype is int64: values are": lambda xp: csr(xp).astype(int),
        r"index_dtype is int16: in": lambda xp: good(xp).astype(index_dtype=np.int16),
        r"is float64: i": lambda xp: csr(xp).astype(index_dtype=float),
        r"'i9', which is": lambda xp: csr(xp).astype(index_dtype="i9"),
        r"dtype is int64": lambda xp: good(xp).with_data(xp.ones(2, int)),
    },
    IndexRangeError: {
        r"shape \(2147483648, 2\) with 2 entries goes beyond int32 "
        r".*: use int64 indices": lambda xp: coo(xp, index=np.int64, shape=(2**31, 2)).astype(
            index_dtype=np.int32
        ),
        r"shape \(1, 2199023255552\) with 1 entries goes beyond int32": lambda xp: COO(
            xp.zeros(1, np.int64), xp.full(1, 2**40, np.int64), shape=(1, 2**41)
        ).astype(index_dtype=np.int32),
        r"with 2147483648 entries goes beyond int32": lambda xp: COO._trusted(
            row=huge(xp, np.int64), col=huge(xp, np.int64), data=None, shape=(1, 1)
        ).astype(index_dtype=np.int32),
    },
    ShapeError: {
        r"data has shape \(1,\)": lambda xp: good(xp).with_data([1.0]),
        r"\(2, 1\) but": lambda xp: good(xp).with_data(xp.ones((2, 1))),
    },
    UnsupportedError: {
        r"level is 'deep': use": lambda xp: good(xp).check("deep"),
    },
    DeviceError: {
        r"device is 'gpu': use \"cpu\", \"cuda\"": lambda xp: good(xp).to("gpu"),
        r"device is 'cpu:0': use": lambda xp: good(xp).to("cpu:0"),
        r"device is 'cuda:': use": lambda xp: good(xp).to("cuda:"),
        r"device is 'cuda:x': use": lambda xp: good(xp).to("cuda:x"),
        r"device is 'cuda:-1': use": lambda xp: good(xp).to("cuda:-1"),
        r"device is None: use \"cpu\"": lambda xp: good(xp).to(None),
        r"device is 0: use \"cpu\"": lambda xp: good(xp).to(0),
    },
}

KEYS = [
    (lambda xp: 0, UnsupportedError, r"rows: 0 is one place; use the slice 0:1"),
    (lambda xp: np.int64(1), UnsupportedError, r"rows: 1 is one place; use the slice 1:2"),
    (lambda xp: -1, UnsupportedError, r"rows: -1 is one place; use the slice -1:\."),
    (lambda xp: -2, UnsupportedError, r"rows: -2 is one place; use the slice -2:-1\."),
    (lambda xp: 2, DtypeError, r"rows: the key has dtype int64 and shape \(\); use a slice"),
    (lambda xp: (0, 0), UnsupportedError, r"rows: 0 is one place"),
    (lambda xp: (slice(None), 1), UnsupportedError, r"columns: 1 is one place; use the sl"),
    (lambda xp: 0.5, DtypeError, r"rows: 0\.5 chooses none; use a slice, a mask or 1-D"),
    (lambda xp: True, DtypeError, r"rows: True chooses none"),
    (lambda xp: None, DtypeError, r"rows: None chooses none"),
    (lambda xp: ..., DtypeError, r"rows: Ellipsis chooses none"),
    (lambda xp: "row", DtypeError, r"rows: 'row' chooses none"),
    (lambda xp: slice(0, 0.5), DtypeError, r"rows: slice\(0, 0\.5, None\) is no slice of in"),
    (lambda xp: slice(None, None, 0), DtypeError, r"no slice of integers \(slice step cann"),
    (lambda xp: xp.ones(2), DtypeError, r"rows: the key has dtype float64 and shape \(2"),
    (lambda xp: xp.ones((1, 1), int), DtypeError, r"dtype int64 and shape \(1, 1\); use a sl"),
    (lambda xp: xp.ones(1, bool), ShapeError, r"has 1 places for 2 rows; give one for each"),
    (lambda xp: (slice(None), xp.ones(9, bool)), ShapeError, r"has 9 places for 2 col"),
    (lambda xp: xp.asarray([2]), IndexRangeError, r"from 2 to 2 but .* 2 rows; use -2 to 1"),
    (lambda xp: xp.asarray([0, -3]), IndexRangeError, r"rows: the key goes from -3 to 0 but"),
    (lambda xp: (slice(None), xp.asarray([7])), IndexRangeError, r"columns: .* 7 to 7 but"),
    (lambda xp: (slice(1), slice(1), slice(1)), ShapeError, r"got 3 keys: .* give two"),
    (lambda xp: xp.full(1, 2**63, np.uint64), IndexRangeError, r"from 9223372036854775808"),
]

CASES = [
    *(
        (error, text, changed(make, field, value))
        for make, rows in WRONG.items()
        for field, value, error, text in rows
    ),
    *(
        (DtypeError, text, lambda xp, f=field, d=dtype: sgt(xp, **{f: array(xp, GOOD_SGT[f], d)}))
        for field, dtype, text in SGTS_DTYPES
    ),
    *((error, text, lambda xp, key=key: good(xp)[key(xp)]) for key, error, text in KEYS),
    *(
        (
            UnsupportedError,
            rf"{make.__name__} -> cbsr: a CBSR is made from dense features, by .*maxk\(X, k\)",
            lambda xp, make=make: make(xp).asformat("cbsr"),
        )
        for make in (coo, csr, csc, sgt)
    ),
    *rows_of(MORE, CONVERSIONS, METHODS),
]


@pytest.mark.parametrize(("error", "text", "build"), CASES, ids=[text for _, text, _ in CASES])
def test_it_is_refused(xp, error, text, build):
    refuse(error, text, build, xp)


# What only NumPy can hold: objects, strings, dates, masked arrays, nested lists.

ONLY_NUMPY = {
    DtypeError: {
        r"row holds Python obj": lambda _: coo(np, row=np.array([0, None])),
        r"row\.dtype is <U1": lambda _: coo(np, row=np.array(["0", "1"])),
        r"is datetime64\[s\]: ind": lambda _: coo(np, row=np.zeros(2, "M8[s]")),
        r"row holds Python objects \(dtype object": lambda _: coo(np, row={0, 1}),
        r"row holds Python objects": lambda _: COO([2**70], [0], shape=(2, 2)),
        r"indices": lambda _: csr(np, indices=np.array([1, "x"], object)),
        r"data holds Python": lambda _: coo(np, data=np.array([1, None])),
        r"data\.dtype is <U1": lambda _: coo(np, data=np.array(["a", "b"])),
        r"data\.dtype is timed": lambda _: coo(np, data=np.zeros(2, "m8[s]")),
        r"data\.dtype is \[": lambda _: coo(np, data=np.zeros(2, "f4,f4")),
        r"values are float16": lambda _: coo(np, data=np.zeros(2, "g")),
        r"data\.dtype is int64": lambda _: coo(np).with_data(np.array([1, 2])),
        r"X holds Python objects": lambda _: from_dense(np.array([[None]])),
        r"X\.dtype is <U1: values": lambda _: from_dense(np.array([["a"]])),
        r"rows holds Python objects": lambda _: good(np)[[None]],
    },
    ShapeError: {
        r"row is no array": lambda _: COO([[0], [1, 2]], [0], shape=(2, 2)),
        r"row has shape \(\): give a 1-D array": lambda _: coo(np, row="01"),
        r"X is no array .*: give rows": lambda _: from_dense([[1.0], [1.0, 2.0]]),
        r"rows is no array": lambda _: good(np)[[[0], [0, 1]]],
    },
    UnsupportedError: {
        r"row is a masked a": lambda _: coo(np, row=np.ma.array([0, 1])),
        r"X\.filled\(0\)": lambda _: from_dense(np.ma.ones((1, 1))),
    },
}


@pytest.mark.parametrize(
    ("error", "text", "build"),
    rows_of(ONLY_NUMPY),
    ids=[text for _, text, _ in rows_of(ONLY_NUMPY)],
)
def test_what_only_numpy_holds_is_refused(error, text, build):
    refuse(error, text, build)


#: What numpy cannot share of torch.
TENSORS = {
    DtypeError: {
        r"Tensor .*: detach it": lambda t: t.ones(2, requires_grad=True),
        r"dtype that numpy has": lambda t: t.ones(2, dtype=t.bfloat16),
        r"numpy cannot take": lambda t: t.ones(2, dtype=t.complex64).conj(),
        r"data: numpy .*: .*make it dense": lambda t: t.eye(2).to_sparse(),
        r"data\.dtype is int32: values": lambda t: t.ones(2, dtype=t.int32),
    },
    DeviceError: {r"data has no memory to share": lambda t: t.ones(2, device="meta")},
}


@pytest.mark.parametrize(("error", "text", "build"), rows_of(TENSORS))
def test_a_tensor_that_numpy_cannot_share_is_refused(error, text, build):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    refuse(error, text, lambda xp: coo(xp, data=build(torch)))


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


class Tensor:
    def __dlpack_device__(self):
        return 10, 0  # ROCm


def test_foreign_devices_and_those_without_cupy_are_refused(monkeypatch):
    refuse(DeviceError, r"row lives on DLPack device \(10", lambda xp: coo(xp, row=Tensor()))
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = r"CuPy is not installed: pip install 'sparsefmt\[cuda13\]' \(or \[cuda12\]\)"
    refuse(DeviceError, text, lambda xp: good(xp).to("cuda"))


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
    refuse(DeviceError, text, lambda xp: good(xp).to("cuda:99"))
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


def test_a_refused_conversion_leaves_its_input_alone(xp):
    A = good(xp)
    before = A.copy()
    with pytest.raises(UnsupportedError):
        convert.to_format(A, "cbsr")
    assert A == before
