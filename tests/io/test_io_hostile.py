"""Files and paths that would block, exhaust memory, or come back different without a word."""

import bz2
import gzip
import itertools
import os
import re
import resource
import socket
import subprocess
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.io
from test_io_limits import save

from sparsefmt import COO
from sparsefmt.errors import FileFormatError, OutOfMemoryError, UnsupportedError
from sparsefmt.io import file_kind, read, read_planetoid, write

ENDINGS = ["mtx", "mtx.gz", "mtx.bz2", "csv", "tsv.gz", "txt", "edges.bz2", "npz"]
ONE = COO(*np.array([[0], [1]], np.int32), np.array([2.0]), shape=(2, 2))
LARGEST = 2**53 - 1  #: the last id of an edge list
SKEW = "%%MatrixMarket matrix coordinate real skew-symmetric\n"


# Ids that float64 does not hold


@pytest.mark.parametrize("ending", ["txt", "csv", "tsv", "edges", "txt.gz"])
@pytest.mark.parametrize("place", [(2**53, 0), (0, 2**53), (2**53 + 1, 0), (0, 2**59)])
def test_ids_beyond_float64_are_not_written(tmp_path, ending, place):
    row, col = (np.array([axis]) for axis in place)
    path = tmp_path / f"a.{ending}"
    with pytest.raises(UnsupportedError, match=rf"vertex {max(place)}: .* write \.npz or \.mtx"):
        write(path, COO(row, col, shape=(2**60 - 2, 2**60 - 2)))
    assert not path.exists()


@pytest.mark.parametrize("vertex", [2**53, 2**53 + 1, 2**60])
@pytest.mark.parametrize("name", ["source", "target"])
def test_ids_beyond_float64_are_not_read(tmp_path, vertex, name):
    edge = f"{vertex} 0" if name == "source" else f"0 {vertex}"
    message = f"{name} is '{vertex}': vertices are integers from 0 to {LARGEST}; .* from .npz"
    sized = save(tmp_path, "a.txt", f"# shape: {2**60 - 2} x {2**60 - 2}\n0 0\n{edge}\n")
    with pytest.raises(FileFormatError, match=f"line 3: .*{message}"):
        read(sized, format="coo")
    with pytest.raises(FileFormatError, match=f"line 2: .*{message}"):
        read(save(tmp_path, "b.txt", f"0 0\n{edge}\n"), format="coo", num_nodes=2**60 - 2)


@pytest.mark.parametrize("size", [2**53, 2**53 + 5, 2**60 - 2])
@pytest.mark.parametrize("ending", ["txt", "csv", "mtx", "npz"])
def test_ids_below_come_back_whatever_the_shape(tmp_path, ending, size):
    A = COO(np.array([LARGEST, 3]), np.array([0, LARGEST]), shape=(size, size))
    large = COO(np.array([2**53 + 1]), np.array([2**59 + 1]), shape=(2**60 - 2, 2**60 - 2))
    for B in (A, large) if ending in ("mtx", "npz") else (A,):  # which hold larger ids too
        write(tmp_path / f"a.{ending}", B)
        assert read(tmp_path / f"a.{ending}", format="coo") == B


def test_a_shape_beyond_int64_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match=r"a\.txt"):
        read(save(tmp_path, "a.txt", f"# shape: {2**63} x 2\n0 1\n"), format="coo")


# Memory


def test_a_bomb_in_one_header_line_stops_at_the_longest_line(tmp_path):
    path = tmp_path / "bomb.mtx.gz"
    head = gzip.compress(b"%%MatrixMarket matrix coordinate real general\n%")
    path.write_bytes(head + gzip.compress(b"x" * 2**24) * 192)
    code = """
import resource, sys
import scipy.io
from sparsefmt.errors import FileFormatError
from sparsefmt.io import read
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
try:
    read(sys.argv[1])
except FileFormatError as error:
    print(error)
print("more KiB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""
    run = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | BLAS)
    assert "a line of more than 65536 bytes: shorten it." in done.stdout, done.stderr
    assert int(done.stdout.split()[-1]) < 50_000


BLAS = {"OPENBLAS_NUM_THREADS": "1"}  # each thread maps address space, and that is limited


def test_max_bytes_bounds_the_header_and_its_banner_is_line_1(tmp_path):
    path = tmp_path / "a.mtx.gz"
    text = b"%%MatrixMarket matrix coordinate real general\n" + b"% c\n" * 300_000
    path.write_bytes(gzip.compress(text + b"1 1 0\n"))
    with pytest.raises(FileFormatError, match="more than max_bytes=1000000 bytes"):
        read(path, max_bytes=1_000_000)
    assert read(path).shape == (1, 1)
    path = save(tmp_path, "a.mtx", "%%MatrixMarket matrix coordinate large general\n%\n%\n1 1 0\n")
    with pytest.raises(FileFormatError, match="line 1: Invalid MatrixMarket header element: large"):
        read(path)


@pytest.mark.parametrize("function", ["mminfo", "mmread"])
@pytest.mark.parametrize("ending", ["mtx", "mtx.gz"])
def test_memory_that_scipy_misses_is_reported(tmp_path, monkeypatch, function, ending):
    path = tmp_path / f"a.{ending}"
    write(path, ONE)
    monkeypatch.setattr(scipy.io, function, Mock(side_effect=MemoryError("std::bad_alloc")))
    with pytest.raises(OutOfMemoryError, match=rf"{re.escape(str(path))}: .*std::bad_alloc"):
        read(path)
    monkeypatch.undo()
    assert read(path, format="coo") == ONE


# Paths that are no regular files


def device(path):
    path.symlink_to("/dev/zero")


def null(path):
    path.symlink_to("/dev/null")


def local_socket(path):
    here = os.open(path.parent, os.O_RDONLY)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("make", [device, null, os.mkfifo, local_socket])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, make, ending):
    path = tmp_path / f"a.{ending}"
    make(path)
    kind = path.stat().st_mode
    for act in (read, lambda path: write(path, ONE)):
        with pytest.raises(UnsupportedError, match="is a device, pipe or socket, and only regular"):
            act(path)
    assert path.stat().st_mode == kind
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("part", ["graph", "x", "test.index"])
@pytest.mark.parametrize("make", [device, os.mkfifo])
def test_planetoid_parts_are_regular_files(tmp_path, make, part):
    (tmp_path / "ind.a.graph").write_bytes(b"")
    (tmp_path / f"ind.a.{part}").unlink(missing_ok=True)
    make(tmp_path / f"ind.a.{part}")
    for path in (tmp_path, tmp_path / "ind.a.graph"):
        for act in (read, read_planetoid):
            with pytest.raises(UnsupportedError, match=rf"ind\.a\.{part}: it is a device, pipe"):
                act(path)


def test_links_to_regular_files_are_read(tmp_path):
    write(tmp_path / "a.npz", ONE)
    (tmp_path / "b.npz").symlink_to("a.npz")
    assert read(tmp_path / "b.npz", format="coo") == ONE


@pytest.mark.parametrize("act", [read, lambda path: write(path, ONE), read_planetoid])
def test_impossible_names_are_refused(tmp_path, act):
    with pytest.raises(FileFormatError, match="path is '', which no file can have: give the name"):
        act("")  # which is not the current folder
    for stem, ending in itertools.product(("a\0b", "a\ud800"), ENDINGS):
        path = f"{tmp_path}/{stem}.{ending}"
        if act is not read_planetoid:
            with pytest.raises(FileFormatError, match=re.escape(f"path is {path!r}, which no")):
                act(path)
    if act in (read, read_planetoid):
        with pytest.raises(FileFormatError, match="give another name"):
            act("ind.a\0b.graph")


# Lines of Matrix Market files


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("2 2 1\n1 1 5\n", 3),
        ("2 2 2\n2 1 5\n2 2 0\n", 4),
        ("% c\n\n3 3 3\n\n2 1 5\n\n \n3 3 1\n1 1 1", 9),
    ],
)
def test_skew_symmetric_files_have_no_diagonal(tmp_path, body, line):
    path = save(tmp_path, "a.mtx", SKEW + body)
    place = f"{re.escape(str(path))}, line {line}: "
    with pytest.raises(FileFormatError, match=f"{place}an entry on the diagonal.*remove the line"):
        read(path)
    A = read(save(tmp_path, "a.mtx", SKEW + "3 3 2\n2 1 5\n3 1 4\n"))
    assert A.toarray().tolist() == [[0, -5, -4], [5, 0, 0], [4, 0, 0]]


@pytest.mark.parametrize("comments", ["", "% a\n", "%\n\n% b\n  % c\n"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("3\n1 1\n", "Invalid integer value|not of length 3"),
        ("2.5 2 1\n", "Invalid integer value"),
        ("one 2 1\n", "Invalid integer value"),
        ("2 2\n", "Invalid integer value|not of length 3"),
        ("2 2 1 7\n", "not of length 3: give"),
        ("-2 2 1\n", "can't be negative: mend the sizes"),
        ("2 2 99999999999999999999\n", "Integer out of range"),
        ("", "Premature EOF: give"),
    ],
)
def test_the_line_of_the_sizes_is_named(tmp_path, comments, sizes, message):
    banner = "%%MatrixMarket matrix coordinate real general\n"
    path = save(tmp_path, "a.mtx", banner + comments + sizes)
    place = f"{re.escape(str(path))}, line {2 + comments.count(chr(10))}: "
    with pytest.raises(FileFormatError, match=f"{place}.*({message})"):
        read(path)


# What other modules ask


def test_the_kind_of_a_file_that_need_not_exist(tmp_path):
    kinds = {"a.mtx.gz": "Matrix Market", "a.npz": "npz", "a.CSV": "edge list"}
    kinds["ind.cora.graph"] = "Planetoid"
    for name, kind in kinds.items():
        assert file_kind(tmp_path / name) == kind
    with pytest.raises(UnsupportedError, match="is not known"):
        file_kind(tmp_path / "a.json")


# Files whose reading would not end, or end the process


def pickled(graph):
    return "ind.a.graph", b"\x80\x04" + graph + b"."


def numbers(dtype, raw):
    """A dictionary with 99 999 neighbours, all of them one NumPy scalar."""
    number = b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n%s\x85R%stRq\1" % (dtype, raw)
    return pickled(b"%s0}K\1](%ses" % (number, b"h\1" * 99_999))


#: A list of two lists, and so on: each is the last one twice.
LISTS = b"]q\0" + b"".join(b"0](h%ch%ceq%c" % (i, i, i + 1) for i in range(28))


def colliding():
    """A dictionary of 800 KB, all of whose keys have the hash 0."""
    keys = ((key * (2**61 - 1)).to_bytes(10, "little") for key in range(1, 62_000))
    return pickled(b"}(" + b"".join(b"\x8a\x0a%sN" % key for key in keys) + b"u")


MALICE = {
    "deep key": (lambda: pickled(b"}K\x01" + b"\x85" * 150_000 + b"K\x01s"), "a tuple as a key"),
    "deep key of old": (lambda: pickled(b"(K\x01" + b"\x85" * 150_000 + b"Nd"), "a tuple as a key"),
    "deep set": (lambda: pickled(b"\x8f(K\x01" + b"\x85" * 150_000 + b"\x90"), "nothing of it"),
    "colliding": (colliding, "a int as a key"),
    "colliding memo": (
        lambda: pickled(b"N" + b"".join(b"p%d\n" % (k * (2**61 - 1)) for k in range(1, 38_000))),
        "a int as a key",
    ),
    "long key": (
        lambda: pickled(b"}\x8b\0\0\x06\0" + b"\x7f" * 0x60000 + b"q\0(" + b"h\0N" * 99999 + b"u"),
        "nothing of it was run",
    ),
    "long number": (
        lambda: pickled(
            b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(S'i8'\nI0\nI1\ntR"
            b"X\x09\0\0\x00123456789tRq\x010}K\x01](h\x01es"
        ),
        "a number of 9 bytes",
    ),
    "long number in Latin-1": (
        lambda: numbers(
            b"X\2\0\0\0i8", b"c_codecs\nencode\n(X\0\0\1\0%sX\6\0\0\0latin1tR" % (b"a" * 65536)
        ),
        "a number of 65536 bytes",
    ),
    "shared lists as dtype": (lambda: numbers(LISTS, b"U\0"), "values of dtype a list"),
    "long name": (lambda: pickled(b"c%s\na\n" % (b"a" * 10**6)), "a name of 1000001 letters"),
    "empty gzip": (lambda: ("a.csv.gz", gzip.compress(b"") * 10**6), "1001 compressed pieces"),
    "empty bzip2": (lambda: ("a.mtx.bz2", bz2.compress(b"") * 10**5), "1001 compressed pieces"),
    "behind bzip2": (lambda: ("a.csv.bz2", bz2.compress(b"0 1\n") + b"x"), "data is damaged"),
    "behind gzip": (lambda: ("a.csv.gz", gzip.compress(b"0 1\n") + b"x"), "data is damaged"),
    "zeros behind bzip2": (lambda: ("a.txt.bz2", bz2.compress(b"0 1\n") + b"\0"), "is damaged"),
}


@pytest.mark.parametrize("case", MALICE)
def test_what_would_not_end_is_refused_in_time(tmp_path, case):
    make, message = MALICE[case]
    name, raw = make()
    path = tmp_path / name
    path.write_bytes(raw)
    start, used = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileFormatError, match=rf"{re.escape(str(path))}: .*{message}"):
        read(path)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 200_000


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_members_behind_each_other_are_one_text(tmp_path, pack):
    path = tmp_path / f"a.csv.{'gz' if pack is gzip.compress else 'bz2'}"
    lines = [b"%d %d\n" % (i, i + 1) for i in range(900)]
    zeros = b"\0" * 70_000 if pack is gzip.compress else b""  # as tapes add them
    path.write_bytes(b"".join(map(pack, lines)) + pack(b"") + zeros)
    assert read(path).nnz == 900


@pytest.mark.parametrize("ending", ["mtx", "mtx.gz"])
@pytest.mark.parametrize("change", ["cut", "grown", "other"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, ending, change):
    """In the last of its passes SciPy would read beyond its buffer."""
    text = b"%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 1234567\n"
    changed = {"cut": text[:-4], "grown": text + b"1 1 x", "other": text.replace(b"7", b"8")}
    pack = gzip.compress if ending == "mtx.gz" else bytes
    path = tmp_path / f"a.{ending}"
    path.write_bytes(pack(text))
    original = scipy.io.mmread

    def late(stream, **options):
        path.write_bytes(pack(changed[change]))
        return original(stream, **options)

    monkeypatch.setattr(scipy.io, "mmread", late)
    with pytest.raises(FileFormatError, match=rf"a\.{ending}: it changed while it was read: read"):
        read(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_name_that_is_no_utf8_is_read(tmp_path, ending):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff." + ending.encode())
    write(path, ONE)
    assert read(path, format="coo") == ONE
