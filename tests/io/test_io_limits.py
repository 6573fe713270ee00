"""Where reading is refused: at the first byte, line or number beyond a limit, and not before it."""

import gzip
import os
import re
import resource
import tracemalloc
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from test_io_planetoid import save as save_planetoid

from sparsefmt import CBSR, COO
from sparsefmt.errors import DtypeError, FileFormatError, OutOfMemoryError, UnsupportedError
from sparsefmt.io import (
    bounded,
    edge_list,
    matrix_market,
    memory,
    npz,
    planetoid,
    read,
    read_planetoid,
    write,
)

REAL = "%%MatrixMarket matrix coordinate real general\n"


def save(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def limited(path, needed, **options):
    """Check that a file is read with so many ``max_bytes``, and refused with one less."""
    read(path, max_bytes=needed, **options)
    with pytest.raises((FileFormatError, OutOfMemoryError), match="raise max_bytes"):
        read(path, max_bytes=needed - 1, **options)


@contextmanager
def refused_within(peak, message):
    """Check that a file is refused with that message, and with less memory than ``peak``."""
    tracemalloc.start()
    with pytest.raises(FileFormatError, match=message):
        yield
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < peak


# Bytes that a conversion takes


def matrices(index, values):
    """Full rows and columns, one column only, one row only, a cell, nothing."""
    for shape in [(48, 32), (48, 1), (1, 33), (1, 1), (0, 3), (3, 0)]:
        row, col = (places.ravel().astype(index) for places in np.indices(shape))
        yield COO(row, col, values and np.ones(len(row), values), shape=shape)


@pytest.mark.parametrize("values", [None, "float16", "float64"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_sizes_are_those_of_full_matrices_in_every_format(index, values):
    for A in matrices(index, values):
        for format in ("coo", "csr", "csc", "sgt"):
            for tile in [(16, 8), (1, 1), (300, 2)] if format == "sgt" else [None]:
                B = A.asformat(format, **({"tile": tile} if tile else {}))
                for start in (A, A.tocsr(), B):
                    size = memory._size(start, format, A.index_dtype.itemsize, tile)
                    assert size == B.nbytes, (start, format, tile)


def test_sizes_of_tiles_are_no_less_than_the_tiles_take():
    rng = np.random.default_rng(5)
    for n_rows, n_cols, nnz in [(40, 50, 60), (400, 9, 90), (9, 4000, 90), (90, 90, 2000)]:
        A = COO(rng.integers(0, n_rows, nnz), rng.integers(0, n_cols, nnz), shape=(n_rows, n_cols))
        for tile in [(16, 8), (1, 1), (2, 32), (64, 2)]:
            assert memory._size(A, "sgt", 8, tile) >= A.tosgt(tile).nbytes


@pytest.mark.parametrize("goal", ["coo", "csr", "csc", "sgt"])
@pytest.mark.parametrize("start", ["coo", "csr", "csc", "sgt", "cbsr"])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_a_conversion_is_refused_one_byte_below_its_peak(tmp_path, start, goal, itemsize):
    """Two formats of the path at a time, and the first where it is none of them; then the cast."""
    assert memory.FACTOR == 2.5  # as tests/formats/test_conversion_memory.py grants
    if start == "cbsr":
        columns = np.tile(np.arange(32, dtype=np.uint8), (48, 1))
        A = CBSR(columns, np.ones(columns.shape), shape=(48, 32))
    else:
        A = next(matrices("int32", "float64")).asformat(start)
    path = [A, *(A.asformat(step) for step in memory.convert.steps(A, goal))]
    sizes = [B.nbytes for B in path]
    peak = max((memory.FACTOR * (a + b) for a, b in pairwise(sizes)), default=0)
    peak += sizes[0] if len(sizes) > 2 else 0
    if itemsize != A.index_dtype.itemsize:
        peak = max(
            peak, 2 * sum(sizes) + 2 * path[-1].astype(index_dtype=f"int{8 * itemsize}").nbytes
        )
    file = tmp_path / "a.npz"
    memory.check_conversion(file, A, goal, itemsize, None, int(np.ceil(peak)))
    if peak:
        with pytest.raises(OutOfMemoryError, match=rf"takes {int(peak)} bytes"):
            memory.check_conversion(file, A, goal, itemsize, None, int(np.ceil(peak)) - 1)


def test_the_soft_limit_of_the_address_space_counts(monkeypatch):
    pages, size = 1000, resource.getpagesize()
    for text in ("", f"{pages} 50 9\n"):
        texts = {"/proc/self/statm": text}
        monkeypatch.setattr(memory, "_text", lambda path, texts=texts: texts.get(str(path), ""))
        for hard in (resource.RLIM_INFINITY, 9000 * size):
            monkeypatch.setattr(resource, "getrlimit", lambda which, hard=hard: (5000 * size, hard))
            assert memory.default_limit() == (5000 - (pages if text else 0)) * size // 2


# Bytes that text takes


@pytest.mark.parametrize(
    ("banner", "dtype", "bytes_of_an_entry"),
    [
        ("coordinate real general", None, 16 + 4),
        ("coordinate pattern general", None, 16 + 4),
        ("coordinate real general", "float32", 16 + 4 + 8),
        ("coordinate real general", "float64", 16 + 4 + 16),
        ("coordinate integer general", None, 16 + 32),
        ("coordinate integer general", "float32", 16 + 32),
        ("coordinate real symmetric", None, 3 * 16 + 10),
        ("coordinate real symmetric", "float64", 2 * (16 + 4 + 16)),
        ("coordinate integer symmetric", None, 2 * (16 + 32)),
        ("array real general", None, 16 + 4),
        ("array integer general", None, 16 + 32),
        ("array real symmetric", "float32", 16 + 4 + 8),
    ],
)
def test_headers_promise_bytes_for_each_entry(banner, dtype, bytes_of_an_entry):
    """Of SciPy's arrays with 4-byte indices, as mirrored, and of casts and comparisons."""
    format, field, symmetry = banner.split()
    for n in (1, 10, 1000):
        header = matrix_market._Header(n, n, n * n, format, field, symmetry)
        assert header.peak(dtype) == n * n * bytes_of_an_entry
    wide = matrix_market._Header(2**31, 2**31, 7, "coordinate", field, "general")
    narrow = wide._replace(rows=2**31 - 1, cols=2**31 - 1)
    assert wide.peak(dtype) - narrow.peak(dtype) == 7 * 8


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_the_header_go_to_65536_bytes(tmp_path, end):
    for size in (65_534, 65_535, 65_536, 65_537):
        comment = "%" * (size - len(end)) + end
        path = save(tmp_path, "a.mtx", f"{REAL}{comment}2 2 1\n1 1 5\n")
        if size < 65_536:
            assert read(path).nnz == 1
        else:
            with pytest.raises(FileFormatError, match="more than 65536 bytes"):
                read(path)


@pytest.mark.parametrize("comments", range(5))
def test_lines_of_a_header_are_counted(tmp_path, monkeypatch, comments):
    monkeypatch.setattr(matrix_market, "_LONGEST_HEADER", 4)
    path = save(tmp_path, "a.mtx", REAL + "%\n" * comments + "2 2 1\n1 1 5\n")
    if comments <= 2:
        assert read(path).nnz == 1
    else:
        with pytest.raises(FileFormatError, match="4 lines of header"):
            read(path)


def test_words_for_numbers_have_any_case(tmp_path):
    for word in ("NAN", "nan", "INF", "-INFINITY", "Inf"):
        A = read(save(tmp_path, "a.mtx", f"{REAL}1 1 1\n1 1 {word}\n"))
        assert np.array_equal(A.data, [float(word)], equal_nan=True)


OVERFLOWS = [
    *(
        (f"coordinate real {symmetry}\n2 2 1\n2 1 1e999\n", "line 3: 1e999 is beyond float64")
        for symmetry in ("general", "symmetric", "skew-symmetric")
    ),
    *(
        (f"coordinate real general\n2 2 2\n1 2 inf\n{line}\n", "is beyond float64")
        for line in ("1 1 " + "9" * 400, "1 1 -1e999", "1 1 " + "9" * 400 + ".")
    ),
]


@pytest.mark.parametrize(("text", "message"), OVERFLOWS)
def test_numbers_beyond_float64_are_refused_however_they_end(tmp_path, text, message):
    with pytest.raises(FileFormatError, match=f"{message}|out of range"):
        read(save(tmp_path, "a.mtx", f"%%MatrixMarket matrix {text}"))


@pytest.mark.parametrize("bad", ["1 1 2x", "1 1 --2", "1 1 2.5.5", "1 1 1e5e5", "1 1 +.e", "1 1 e"])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_the_first_of_several_bad_lines_is_named(tmp_path, bad, before):
    text = f"{REAL}9 9 9\n" + "1 1 5\n" * before + f"{bad}\n1 1 y\n1 1 3.3.3\n" + "1 1 5\n" * 6
    with pytest.raises(FileFormatError, match=rf"line {before + 3}: '{re.escape(bad)}' is not"):
        read(save(tmp_path, "a.mtx", text))


@pytest.mark.parametrize("size", [1, 70, 71, 72, 3000])
def test_a_bad_line_is_shown_by_its_first_80_letters(tmp_path, size):
    line = "1 1 2 xx " + "y" * size
    with pytest.raises(FileFormatError, match=f"line 3: '{line[:80]}' is not an entry"):
        read(save(tmp_path, "a.mtx", f"{REAL}1 1 1\n{line}\n"))


@pytest.mark.parametrize("ending", ["mtx", "mtx.gz"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n", " \n"])
def test_scipy_gets_a_text_whose_last_line_ends_and_never_the_file(
    tmp_path, monkeypatch, ending, last
):
    """It reads beyond its buffer where more than blanks stand behind the last number."""
    text = f"{REAL}1 1 1\n1 1 5{last}".encode()
    path = save(tmp_path, f"a.{ending}", text if ending == "mtx" else gzip.compress(text))
    assert read(path).data.tolist() == [5.0]
    monkeypatch.setattr(scipy.io, "mmread", lambda file, **_: pytest.fail(repr(file.read())))
    with pytest.raises(pytest.fail.Exception, match=re.escape(repr(text + b"\n"))):
        read(path)


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("count", [1, 100, 70_000])
def test_edges_are_refused_one_byte_below_what_they_take(tmp_path, columns, count):
    """Each number twice, and 40 bytes for indices, weights and comparisons."""
    path = save(tmp_path, "a.txt", (" ".join("011"[:columns]) + "\n") * count)
    limited(path, count * (columns * 16 + 40), format="coo")


@pytest.mark.parametrize("edges", ["", "0 1\n"])
@pytest.mark.parametrize("line", ["# none\n", "\n", "   \n"])
def test_text_without_edges_is_counted(tmp_path, monkeypatch, line, edges):
    monkeypatch.setattr(edge_list, "_BLOCK", 64)
    monkeypatch.setattr(edge_list, "_IDLE", 1000)
    shape = "# shape: 2 x 2\n"
    assert read(save(tmp_path, "a.txt", shape + edges + line * (800 // len(line)))).shape == (2, 2)
    with pytest.raises(FileFormatError, match="more than 1000 bytes of blank lines and comments"):
        read(save(tmp_path, "a.txt", shape + edges + line * (1200 // len(line))))


@pytest.mark.parametrize("line", ["0.5 1.5", "0.5 1", "1 0.5", "-1 -1", "-1.5 0.5"])
@pytest.mark.parametrize("count", [1, 3])
def test_vertices_are_whole_and_not_negative_in_any_number_of_lines(tmp_path, line, count):
    with pytest.raises(FileFormatError, match="vertices are integers from 0"):
        read(save(tmp_path, "a.txt", f"{line}\n" * count))


# Archives and pickles


def test_an_archive_has_at_most_so_many_members(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez(path, indptr=[0, 1], indices=[0], shape=[1, 1], x=1, y=2)
    for most in (4, 5, 6):
        monkeypatch.setattr(npz, "_MOST_MEMBERS", most)
        if most >= 5:
            assert read(path).nnz == 1
        else:
            with pytest.raises(FileFormatError, match="at most 4"):
                read(path)


@pytest.mark.parametrize(
    ("dtype", "bytes_of_a_value"),
    [("int64", 28), ("uint64", 28), ("int32", 4 + 12), ("int8", 7 + 12), ("bool", 7 + 12),
     ("float64", 12), ("float32", 12)],
)  # fmt: skip
def test_an_archive_is_refused_below_its_arrays_and_their_casts(tmp_path, dtype, bytes_of_a_value):
    """Which go into the buffers as far as they fit there."""
    n = 400_000
    arrays = {
        "indptr": np.array([0, n], np.int32), "indices": np.arange(n, dtype=np.int32),
        "shape": np.array([1, n]), "data": np.ones(n, dtype),
    }  # fmt: skip
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    members = sum(array.nbytes + 128 for array in arrays.values())
    limited(path, members + n * bytes_of_a_value - npz._BUFFERS, format="csr")


@pytest.mark.parametrize("width", [0, 1, 5, 60])
@pytest.mark.parametrize("dense", [True, False])
def test_planetoid_features_have_room_for_each_vertex(tmp_path, dense, width):
    """Dense ones for each number, sparse ones for each row."""
    matrix = np.array if dense else scipy.sparse.csr_matrix
    x = {"x": (2, width), "allx": (4, width), "tx": (2, width)}
    parts = {name: matrix(np.ones(shape, np.float32)) for name, shape in x.items()}
    n = 100_001
    save_planetoid(tmp_path, graph={0: [n - 1]}, **parts)
    needed = n * (max(width, 1) if dense else 1) * 24
    read_planetoid(tmp_path, max_bytes=needed)
    with pytest.raises(FileFormatError, match=f"{n} vertices do not fit"):
        read_planetoid(tmp_path, max_bytes=needed - 1)


def test_a_planetoid_graph_has_room_for_its_objects_and_vertices(tmp_path):
    path = save_planetoid(tmp_path) / "ind.tiny.graph"
    limited(path, path.stat().st_size * planetoid._LARGEST_OBJECT)
    n = 1_000_001
    limited(save_planetoid(tmp_path, graph={0: [n - 1]}) / "ind.tiny.graph", (n - 1) * 16)


# Options, drafts and signatures


def test_names_of_lists_may_begin_as_those_of_planetoid_but_not_end_so(tmp_path):
    for name in ("ind.a.csv", "ind.graph.txt", "ind.a.edges"):
        assert read(save(tmp_path, name, "0 1\n")).nnz == 1
    with pytest.raises(UnsupportedError, match=r"the ending '.graph' is not known"):
        read(save(tmp_path, "a.graph", "0 1\n"))


@pytest.mark.parametrize("options", [{"index_dtype": "int16"}, {"dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["a.mtx", "a.npz", "a.txt", "ind.a.graph"])
def test_wrong_options_are_refused_before_the_file_is_read(tmp_path, name, options):
    with pytest.raises(DtypeError, match=next(iter(options))):
        read(save(tmp_path, name, b"\0 no such file"), **options)


@pytest.mark.parametrize("name", ["a.npz", "a.mtx.gz"])
def test_drafts_that_nobody_holds_are_removed_and_no_others(tmp_path, name):
    fcntl = pytest.importorskip("fcntl")
    target = tmp_path / name
    prefix = f".{bounded.sha1(name.encode()).hexdigest()[:16]}."
    dead, held, other = (tmp_path / f"{begin}.tmp" for begin in (f"{prefix}1", f"{prefix}2", ".b"))
    for draft in (dead, held, other):
        draft.write_text("draft")
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(target, COO([0], [0], shape=(1, 1)))
    assert sorted(tmp_path.iterdir()) == sorted([target, held, other])


def test_a_draft_that_another_process_swept_away_is_closed(tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    tokens = iter(["first", "second"])
    opened, descriptors = [], os.fstat

    def fstat(descriptor):
        opened.append(descriptor)
        if len(opened) == 1:
            next(tmp_path.glob("*first.tmp")).unlink()
        return descriptors(descriptor)

    monkeypatch.setattr(bounded.secrets, "token_hex", lambda size: next(tokens))
    monkeypatch.setattr(bounded.os, "fstat", fstat)
    draft, raw = bounded._draft(tmp_path / "a.npz", ".b.")
    with raw:
        assert draft.name == ".b.second.tmp"
        assert opened == [raw.fileno()] * 2  # the first was closed, so that its number is free


@pytest.mark.parametrize("ending", ["mtx.gz", "csv.gz", "txt.bz2"])
def test_what_nobody_packed_is_named_under_a_packed_ending(tmp_path, ending):
    texts = {"JSON": b'{"a": 1}\n', "a zip archive": b"PK\x03\x04" + bytes(30),
             "a pickle": b"\x80\x02}q\x00."}  # fmt: skip
    for name, raw in texts.items():
        with pytest.raises(FileFormatError, match=re.escape(f"it holds {name}, which")):
            read(save(tmp_path, f"a.{ending}", raw))
