"""Mutated files: each is read as a valid matrix, or refused by an error that names it."""

import bz2
import gzip
import io
import json
import re
import resource
import signal
import tempfile
import tracemalloc
import zipfile
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import folders
import numpy as np
import scipy.sparse
from hypothesis import strategies as st

from sparsefmt import COO
from sparsefmt.errors import SparseFmtError
from sparsefmt.io import read, write
from sparsefmt.io.chunks import read_chunks

CORPUS = Path(__file__).with_name("corpus.txt")
CORPUS_BYTES = 60_000
TEXTS = ("mtx", "csv", "tsv", "txt", "edges")
ENDINGS = (*TEXTS, "npz", "graph", *folders.PLACES)
#: What ``read`` may take beside ``max_bytes``, as its docstring says.
BUFFERS = 10 * 2**20
#: Seconds of the processor for a file of some kilobytes, and memory, tensors counted.
MOST_SECONDS = 2
MOST_MEMORY = 200 * 10**6

TOKENS = [
    *(b"0", b"-1", b"1", b"2147483648", b"9007199254740993", b"99999999999999999999", b"1e400"),
    *(b"nan", b"-inf", b"0x10", b"1_0", b"1,5", b"+", b"-0.0", b"1e-400", b'"', b"'", b"{}"),
    *(b"\n", b"\r\n", b"\r", b"\0", b" ", b"\t", b",", b";", b"#", b"%", b"%%MatrixMarket "),
    *(b"\xef\xbb\xbf", b"\xff\xfe", "٣".encode(), b"PK\x03\x04", b"\x1f\x8b", b"BZh9"),
    *(b"# shape: 2 x 2\n", b"symmetric", b"complex", b"hermitian", b"pattern", b"array"),
    *(b"source,target,weight\n", b"<i8", b">f4", b"|O", b"True", b"(2,)"),
]
HEADERS = [
    "coordinate real general\n3 2 2\n1 1 1.5\n3 2 -2e3\n",
    "coordinate pattern symmetric\n3 3 3\n1 1\n2 1\n3 3\n",
    "coordinate integer skew-symmetric\n3 3 2\n2 1 4\n3 1 -7\n",
    "coordinate real hermitian\n% note\n2 2 1\n2 1 1\n",
    "coordinate complex hermitian\n2 2 1\n2 1 1 0\n",
    "array real general\n2 3\n1\n0\n2.5\n0\n0\n-1\n",
    "array integer symmetric\n2 2\n1\n2\n3\n",
]
LISTS = [
    "0 1\n1 2\n2 0\n",
    "source,target,weight\n0,1,0.5\n3,1,2\n",
    "# shape: 4 x 5\n# Nodes: 4\n0\t1\t1.5\n3\t4\t-2\n",
    "# shape: 3 x 3\n",
    '{"edges": [[0, 1]]}\n',
    '"0 1"\n',
]
PACKERS = {"": bytes, ".gz": lambda text: gzip.compress(text, mtime=0), ".bz2": bz2.compress}


@dataclass(frozen=True)
class File:
    """What lies under a name with this ending."""

    ending: str
    content: bytes


@cache
def seeds() -> tuple[File, ...]:
    """Valid files of every kind, some that are refused, and what earlier runs kept."""
    found = [File("mtx", f"%%MatrixMarket matrix {text}".encode()) for text in HEADERS]
    found += [File(end, text.encode()) for text in LISTS for end in ("csv", "txt", "edges", "tsv")]
    row, col = np.array([2, 0, 2], np.int32), np.array([1, 1, 0], np.int32)
    A = COO(row, col, np.array([1.0, 0.0, -3.5], np.float32), shape=(3, 4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        for format in ("coo", "csr", "csc", "sgt"):
            for B in (A, A.with_data(None).astype(index_dtype=np.int64)):
                write(path, B.asformat(format), compressed=format == "csc")
                found += [File("npz", path.read_bytes()), File("npz", unsealed(path.read_bytes()))]
    S = scipy.sparse.csr_array((np.ones(3), (row, col)), shape=(3, 4))
    streams = [io.BytesIO() for _ in range(3)]
    scipy.sparse.save_npz(streams[0], S)
    scipy.sparse.save_npz(streams[1], S.tocoo())
    np.savez(streams[2], indptr=S.indptr, indices=S.indices, shape=S.shape)
    found += [File("npz", stream.getvalue()) for stream in streams]
    neighbours = b"(dp0\nI0\n(lp1\nI1\naI2\nasI1\n(lp2\nI0\nasI2\n(lp3\nI0\nas."
    found += [File("graph", neighbours), *corpus()]
    found += [File(ending, folders.seed(ending)) for ending in folders.PLACES]
    for packed, pack in PACKERS.items():  # pieces behind each other, and other bytes behind them
        if packed:
            found += [File(f"csv{packed}", pack(b"0 1\n") * 3 + pack(b"") + b) for b in (b"", b"x")]
            market = pack(b"%%MatrixMarket matrix ") + pack(HEADERS[0].encode())
            found.append(File(f"mtx{packed}", market))
    return tuple(found)


def unsealed(content: bytes) -> bytes:
    """Write an ``.npz`` of this package as earlier releases did, without a checksum."""
    with np.load(io.BytesIO(content)) as archive:
        arrays = dict(archive)
    header = json.loads(str(arrays["sparsefmt"]))
    del header["checksum"]
    stream = io.BytesIO()
    np.savez(stream, **arrays | {"sparsefmt": np.array(json.dumps(header))})
    return stream.getvalue()


def corpus() -> list[File]:
    """Files that earlier runs kept: a line for each, its ending and its bytes in base 64."""
    lines = CORPUS.read_text().splitlines() if CORPUS.exists() else []
    pairs = (line.split(" ") for line in lines)
    return [File(ending, b64decode(text)) for ending, text in pairs]


def keep(files: list[File]) -> int:
    """Append files, the shortest first, to the corpus while it stays small; give how many."""
    lines = CORPUS.read_text().splitlines() if CORPUS.exists() else []
    size, known = sum(map(len, lines)) + len(lines), len(lines)
    for file in sorted(files, key=lambda one: len(one.content)):
        line = f"{file.ending} {b64encode(file.content).decode()}"
        if line not in lines and size + len(line) < CORPUS_BYTES:
            lines.append(line)
            size += len(line) + 1
    CORPUS.write_text("".join(f"{line}\n" for line in lines))
    return len(lines) - known


# Mutations


def _at(content: bytes, place: int) -> int:
    return place % (len(content) + 1)


def _number(content: bytes, place: int, token: bytes, pattern: bytes = rb"-?\d+") -> bytes:
    found = list(re.finditer(pattern, content))
    if not found:
        return content
    one = found[place % len(found)]
    return content[: one.start()] + token + content[one.end() :]


def _digit(content: bytes, place: int, token: bytes) -> bytes:
    """Change one digit, which keeps the lengths that a header declares."""
    return _number(content, place, b"%d" % (len(token) % 10), rb"\d")


def _line(content: bytes, place: int, token: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    at = place % len(lines)
    return b"".join(lines[:at] + [lines[at]] * len(token) + lines[at + 1 :])


EDITS = {
    "number": _number,
    "digit": _digit,
    "line": _line,
    "insert": lambda c, at, token: c[: _at(c, at)] + token + c[_at(c, at) :],
    "set": lambda c, at, token: c[: _at(c, at)] + token + c[_at(c, at) + len(token) :],
    "delete": lambda c, at, token: c[: _at(c, at)] + c[_at(c, at) + len(token) :],
    "truncate": lambda c, at, token: c[: _at(c, at)],
    "repeat": lambda c, at, token: c + c[_at(c, at) :],
}
EDIT = st.tuples(
    st.sampled_from(sorted(EDITS)),
    st.integers(0, 4000),
    st.one_of(st.sampled_from(TOKENS), st.binary(min_size=1, max_size=8)),
)


def edited(content: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for name, place, token in edits:
        content = EDITS[name](content, place, token)
    return content


def _in_members(content: bytes, edits: list[tuple[str, int, bytes]], place: int) -> bytes:
    """Edit one member of a zip and pack all again, so that every checksum is right."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError, RuntimeError):
        return edited(content, edits)
    if members:
        name = sorted(members)[place % len(members)]
        members[name] = edited(members[name], edits)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return stream.getvalue()


@st.composite
def files(draw: st.DrawFn) -> File:
    """Draw a mutated file: one of the seeds under its own or another ending, packed or not."""
    file = draw(st.sampled_from(seeds()))
    edits, place = draw(st.lists(EDIT, max_size=6)), draw(st.integers(0, 9))
    inside = file.content[:2] == b"PK" and draw(st.booleans())
    content = _in_members(file.content, edits, place) if inside else edited(file.content, edits)
    ending = draw(st.sampled_from(ENDINGS)) if draw(st.integers(0, 9)) == 9 else file.ending
    if ending in TEXTS:
        packed = draw(st.sampled_from(sorted(PACKERS)))
        damage = draw(st.lists(EDIT, max_size=2)) if packed else []
        content, ending = edited(PACKERS[packed](content), damage), ending + packed
    return File(ending, content)


OPTIONS = st.fixed_dictionaries(
    {
        "format": st.sampled_from([None, "csr", "coo", "csc", "sgt", "cbsr"]),
        "max_bytes": st.sampled_from([2**24, 2**20, 2**12, 2**27]),
    },
    optional={
        "dtype": st.sampled_from(["float32", "float16", "float64"]),
        "index_dtype": st.sampled_from(["int32", "int64"]),
        "num_nodes": st.sampled_from([0, 3, 1000, 2**40]),
    },
)

# The law


@contextmanager
def _in_time(path: Path) -> Iterator[None]:
    """Let the processor's seconds, not the clock's, end what does not end."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{path.name} takes more than {MOST_SECONDS} s of the processor")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _in_memory(most: int) -> Iterator[None]:
    """Limit what Python and NumPy allocate, and what the process takes from the system."""
    before, traced = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    tracemalloc.reset_peak()
    start = tracemalloc.get_traced_memory()[0]
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1] - start
        if not traced:
            tracemalloc.stop()
        assert peak <= most, f"{peak} bytes, and {most} are allowed"
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert more <= MOST_MEMORY, f"{more} bytes of the system"


def outcome(folder: Path, file: File, options: dict[str, object]) -> str:
    """Read a file as the law allows, and say what happened, without numbers and names."""
    if file.ending in folders.PLACES:
        path = folder / file.ending
        folders.put(path, file.ending, file.content)
        act, left = folders.read, (file.ending, options["max_bytes"])
    else:
        path = folder / f"{'ind.a' if file.ending == 'graph' else 'a'}.{file.ending}"
        path.write_bytes(file.content)
        act, left = read_one, (dict(options),)
    try:
        with _in_memory(int(options["max_bytes"]) + BUFFERS), _in_time(path):
            A = act(path, *left)
    except SparseFmtError as error:
        text = str(error)
        assert str(path) in text, f"an error without the file's name: {text}"
        assert "\n" not in text, text
        return f"{type(error).__name__}: {_template(text.replace(str(path), 'FILE'))}"
    if isinstance(A, str):
        return A
    A.check()
    assert options["format"] in (None, A.format)
    comes_back(folder, A)
    return f"{A.format} {A.dtype} {A.index_dtype}"


def read_one(path: Path, options: dict[str, object]) -> object:
    """Read a graph file, in pieces too."""
    if path.suffix in (".mtx", ".npz", ".graph") or ".mtx." in path.name:
        options.pop("num_nodes", None)  # which is refused without a look at the file
    edges = None
    with suppress(SparseFmtError):
        pieces = read_chunks(path, num_nodes=options.get("num_nodes"))
        edges = sum(len(piece.source) for piece in pieces)
    A = read(path, **options)
    assert edges == A.nnz or "dtype" in options, f"{edges} edges in pieces, {A.nnz} together"
    return A


def comes_back(folder: Path, A: object) -> None:
    """Write what was read, and read the same."""
    path = folder / "back.npz"
    write(path, A)
    B = read(path, format=None)
    assert B.format == A.format
    assert all(
        np.array_equal(getattr(A, name), getattr(B, name), equal_nan=name == "data")
        for name in A._array_fields
        if getattr(A, name) is not None
    )


def _template(text: str) -> str:
    text = re.sub(r"'[^']*'|\"[^\"]*\"|b'[^']*'", "TEXT", text)
    return re.sub(r"-?\d[\d.e+x ]*", "N", text)[:160]
