"""``read`` and ``write`` whatever the file: names, options, round trips, atomic writing."""

import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt import COO, CSR, SGT
from sparsefmt import testing as t
from sparsefmt.errors import (
    DtypeError,
    FileFormatError,
    IndexRangeError,
    OutOfMemoryError,
    ShapeError,
    UnsupportedError,
)
from sparsefmt.formats import checks
from sparsefmt.io import bounded, read, write

TEXT = ["mtx", "mtx.gz", "mtx.bz2", "csv", "tsv", "txt", "edges", "txt.gz", "csv.bz2"]
SPECIAL = [0.0, -0.0, 1.5, -2.25, np.nan, np.inf, -np.inf, 5e-8]


def matrix(format="csr", dtype="float32", index_dtype="int32", weighted=True, **options):
    """A 5 x 7 matrix with special values, a duplicate, an explicit zero and empty rows."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 without ml_dtypes")
    row, col = np.array([[0, 0, 0, 1, 3, 3, 3, 3], [6, 1, 1, 0, 2, 3, 4, 5]], index_dtype)
    data = checks.value_dtype("dtype", dtype) if weighted else None
    data = None if data is None else np.array(SPECIAL).astype(data)
    return COO(row, col, data, shape=(5, 7)).asformat(format, **options)


def bits(A):
    """Every array as bytes: tells 0.0 from -0.0 and one NaN from another."""
    return {name: (array.dtype.name, array.tobytes()) for name, array in A._arrays().items()}


# Round trips


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt"])
def test_npz_gives_back_every_bit(tmp_path, format, dtype, index_dtype, weighted):
    A = matrix(format, dtype, index_dtype, weighted)
    for compressed in (False, True):
        write(tmp_path / "a.npz", A, compressed=compressed)
        B = read(tmp_path / "a.npz", format=None)
        assert B == A
        assert bits(B) == bits(A)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("ending", TEXT)
def test_text_gives_back_every_entry_in_order(tmp_path, ending, dtype, weighted):
    A = matrix("coo", dtype, "int32", weighted)
    path = tmp_path / f"a.{ending}"
    write(path, A)
    B = read(path, format="coo", dtype=A.dtype)
    assert B == A
    assert weighted is False or np.array_equal(np.signbit(B.data), np.signbit(A.data))


@pytest.mark.parametrize("ending", ["mtx", "tsv", "npz"])
@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt"])
def test_any_format_can_be_written_and_asked_for(tmp_path, ending, format):
    path, A = tmp_path / f"a.{ending}", matrix(format)
    before = bits(A)
    write(path, A)
    assert bits(A) == before
    for wanted in ("coo", "csr", "csc", "sgt"):
        B = read(path, format=wanted, dtype="float32")
        assert B.format == wanted
        t.assert_same_matrix(B, matrix("csr"))


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (4, 3), (1, 1)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ending", ["mtx", "csv", "npz", "mtx.gz"])
def test_empty_matrices_keep_their_shape(tmp_path, ending, weighted, shape):
    none = np.zeros(0, np.int32)
    A = COO(none, none, np.zeros(0) if weighted else None, shape=shape)
    write(tmp_path / f"a.{ending}", A)
    assert read(tmp_path / f"a.{ending}", format="coo") == A


@given(A=t.cbsr(allow_nan=True, allow_infinity=True))
def test_npz_round_trip_of_cbsr(tmp_path_factory, A):
    path = tmp_path_factory.getbasetemp() / "round.npz"
    write(path, A)
    assert read(path, format="cbsr") == A
    assert read(path, format="csr") == A.tocsr()


@given(
    A=t.coo(allow_nan=True, allow_infinity=True, max_magnitude=None)
    | t.coo(weighted=False, index_dtype="int32"),
    ending=st.sampled_from(["mtx", "csv", "txt", "mtx.gz", "edges.bz2"]),
)
def test_text_round_trip(tmp_path_factory, A, ending):
    path = tmp_path_factory.getbasetemp() / f"round.{ending}"
    if not A.nnz and A.data is not None and "mtx" not in ending and "csv" not in ending:
        A = A.with_data(None)  # no line tells how many columns there would be
    write(path, A)
    assert read(path, format="coo", dtype=A.dtype, index_dtype=A.index_dtype) == A


# Options


def test_the_default_is_csr_and_none_keeps_the_stored_format(tmp_path):
    write(tmp_path / "a.npz", matrix("csc"))
    assert isinstance(read(tmp_path / "a.npz"), CSR)
    assert read(tmp_path / "a.npz", format=None).format == "csc"


def test_tiles_keep_their_shape_unless_another_is_asked_for(tmp_path):
    A, path = matrix("sgt", tile=(2, 3)), tmp_path / "a.npz"
    write(path, A)
    assert read(path, format="sgt") == A
    assert read(path, format="sgt", tile=(8, 8)) == matrix("sgt", tile=(8, 8))
    write(path, matrix())
    assert read(path, format="sgt").tile == (16, 8)
    assert isinstance(read(path, format="sgt", tile=(4, 4)), SGT)


@pytest.mark.parametrize("ending", ["mtx", "csv", "npz"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtype_rounds_the_values(tmp_path, ending, dtype):
    write(tmp_path / f"a.{ending}", COO([0], [0], np.array([1 / 3]), shape=(1, 1)))
    B = read(tmp_path / f"a.{ending}", dtype=dtype)
    assert (B.dtype, B.data[0]) == (dtype, np.dtype(dtype).type(1 / 3))


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("ending", ["mtx", "csv", "npz"])
def test_index_dtype_is_what_was_asked_for(tmp_path, ending, index_dtype, format):
    write(tmp_path / f"a.{ending}", matrix())
    A = read(tmp_path / f"a.{ending}", format=format, index_dtype=index_dtype)
    assert A.index_dtype == index_dtype
    if ending != "npz":  # text has int32 indices where they fit
        write(tmp_path / f"b.{ending}", matrix(index_dtype="int64"))
        assert read(tmp_path / f"b.{ending}").index_dtype == np.int32


@pytest.mark.parametrize("name", ["A.MTX", "A.Csv", "A.NPZ", "A.TSV.GZ", "a b.mtx", "ä.npz"])
def test_endings_and_names_are_taken_as_users_write_them(tmp_path, name):
    A = matrix("coo", "float64")
    write(tmp_path / name, A)
    assert read(str(tmp_path / name), format="coo") == A
    write(str(tmp_path / name), matrix("coo"))
    assert read(tmp_path / name, format="coo", dtype="float32") == matrix("coo")


@pytest.mark.parametrize("ending", ["mtx", "csv", "npz"])
def test_hypersparse_reads_as_coo_but_not_as_csr(tmp_path, ending):
    A = COO(np.array([0, 2**40 - 1]), np.array([2**40 - 1, 0]), shape=(2**40, 2**40))
    path = tmp_path / f"a.{ending}"
    write(path, A)
    assert read(path, format="coo") == A
    for format in ("csr", "csc", "sgt"):
        with pytest.raises(OutOfMemoryError, match=r'format="coo"'):
            read(path, format=format)


def test_a_shape_beyond_int32_gets_int64_indices(tmp_path):
    one = np.ones(1, np.int32)
    members = {"row": one, "col": one, "data": one, "shape": [2**33, 2], "format": b"coo"}
    np.savez(tmp_path / "a.npz", **members)
    assert read(tmp_path / "a.npz", format="coo").index_dtype == np.int64


OPTIONS = {
    "format": ({"format": "bsr"}, UnsupportedError, r"format is 'bsr': use one of coo, csr"),
    "dtype": ({"dtype": "int32"}, DtypeError, r"dtype is int32: values are float16"),
    "no dtype": ({"dtype": "nonsense"}, DtypeError, r"dtype is 'nonsense'"),
    "index": ({"index_dtype": "int16"}, DtypeError, r"index_dtype is int16"),
    "tile": ({"tile": (16, 8)}, UnsupportedError, r"tile is \(16, 8\) but format is 'csr'"),
    "tile 0": ({"format": "sgt", "tile": (0, 8)}, ShapeError, r"tile is \(0, 8\)"),
    "nodes": ({"num_nodes": 9}, UnsupportedError, r"num_nodes is for edge lists"),
    "nodes -1": ({"num_nodes": -1}, ShapeError, r"num_nodes is -1: it cannot be negative"),
    "bytes": ({"max_bytes": "1G"}, ShapeError, r"max_bytes is '1G': give an integer"),
    "bytes -1": ({"max_bytes": -1}, ShapeError, r"max_bytes is -1"),
    "cbsr": ({"format": "cbsr"}, UnsupportedError, r"csr -> cbsr: .*maxk"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options_are_refused(tmp_path, case):
    options, error, message = OPTIONS[case]
    write(tmp_path / "a.npz", matrix())
    with pytest.raises(error, match=message):
        read(tmp_path / "a.npz", **options)


@pytest.mark.parametrize("ending", ["mtx", "csv", "npz"])
@pytest.mark.parametrize(
    ("options", "error", "mend"),
    [
        ({"format": "coo", "index_dtype": "int32"}, IndexRangeError, "use int64"),
        ({"format": "cbsr"}, UnsupportedError, "maxk"),
    ],
)
def test_a_refused_conversion_names_the_file(tmp_path, ending, options, error, mend):
    path = tmp_path / f"a.{ending}"
    write(path, COO(np.array([2**31]), np.array([0]), shape=(2**32, 2**32)))
    with pytest.raises(error, match=rf"{re.escape(str(path))}: .*{mend}"):
        read(path, **options)


# Names


@pytest.mark.parametrize("name", ["a", "a.gz", "a.npz.gz", "a.json", "a.mtx.zip", "a.pickle", "."])
@pytest.mark.parametrize("act", [read, lambda path: write(path, matrix())])
def test_unknown_endings_are_refused(tmp_path, act, name):
    folder = tmp_path / "folder.d"
    path = folder / name
    with pytest.raises(UnsupportedError, match=r"ending .* is not known: use \.mtx, \.npz, \.csv"):
        act(path)
    assert not folder.exists()


@pytest.mark.parametrize("ending", [*TEXT, "npz"])
def test_missing_and_empty_files_are_refused(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    with pytest.raises(FileNotFoundError):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(FileFormatError, match=path.name):
        read(path)
    if ending != "npz":
        with pytest.raises(UnsupportedError, match=r"compressed is for \.npz"):
            write(path, matrix(), compressed=True)


def test_a_folder_is_read_where_it_holds_planetoid_files_and_never_written(tmp_path):
    with pytest.raises(FileFormatError, match=r"no ind\.<name>\.graph"):
        read(tmp_path)
    with pytest.raises(UnsupportedError, match="only read"):
        write(tmp_path, matrix())


@pytest.mark.parametrize("what", [np.eye(3), None, "graph", [[1]]])
def test_only_formats_are_written(tmp_path, what):
    with pytest.raises(UnsupportedError, match="give a COO, CSR, CSC, SGT or CBSR"):
        write(tmp_path / "a.npz", what)


# Writing


@pytest.mark.parametrize("ending", [*TEXT, "npz"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, ending, monkeypatch):
    path = tmp_path / f"a.{ending}"
    write(path, matrix())
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write(path, matrix(weighted=False))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write(tmp_path / f"b.{ending}", matrix())  # the same matrix gives the same bytes
    assert (tmp_path / f"b.{ending}").read_bytes() == before


def test_writing_goes_through_a_symbolic_link_and_into_folders_that_exist(tmp_path):
    (tmp_path / "real.npz").write_bytes(b"old")
    (tmp_path / "link.npz").symlink_to(tmp_path / "real.npz")
    write(tmp_path / "link.npz", matrix())
    assert (tmp_path / "link.npz").is_symlink()
    assert read(tmp_path / "real.npz") == matrix()
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "a.npz", matrix())


def test_compressed_is_smaller(tmp_path):
    A = CSR(np.arange(2001), np.zeros(2000, np.int64), shape=(2000, 2000))
    write(tmp_path / "a.npz", A)
    write(tmp_path / "b.npz", A, compressed=True)
    assert (tmp_path / "b.npz").stat().st_size * 2 < (tmp_path / "a.npz").stat().st_size
    assert read(tmp_path / "b.npz") == A


def test_a_csr_file_is_a_plain_one_for_others(tmp_path):
    A = matrix("csr")
    write(tmp_path / "a.npz", A)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert np.array_equal(file["indptr"], A.indptr)
        assert file["shape"].tolist() == [5, 7]
        assert json.loads(file["sparsefmt"].item())["format"] == "csr"


def test_errors_of_the_disk_are_let_through(tmp_path, monkeypatch):
    write(tmp_path / "a.csv.gz", matrix())
    for number, error, message in (
        (5, OSError, r"Input/output error: .*a\.csv\.gz"),
        # zipfile looks before the beginning
        (22, FileFormatError, r"a\.csv\.gz: its sizes are damaged .*copy the file"),
    ):
        fail = Mock(side_effect=OSError(number, os.strerror(number)))
        monkeypatch.setattr(bounded.zlib, "decompressobj", fail)
        with pytest.raises(error, match=message):
            read(tmp_path / "a.csv.gz")
