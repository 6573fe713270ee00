"""Headers that promise more than there is: read within ``max_bytes``, or refused by name."""

import gzip
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparsefmt import COO
from sparsefmt.io import write

pytest.importorskip("resource")
LIMIT = 2**28
BUFFERS = 10 * 2**20  #: what ``read`` may take beside ``max_bytes``

SHAPES = [
    (2 * 10**9, 2 * 10**9, 1),
    (2 * 10**8, 5, 1),
    (10**8, 10**8, 10**8),
    (2**40, 3, 1),
    (1, 2**41, 1),
    (5, 2**52, 2),
    (2**60 - 2, 2**60 - 2, 1),
    (2 * 10**6, 2 * 10**6, 1),
    (10**6, 10**6, 4),
    (0, 7, 0),
]
#: The header, and a line for each entry; four where more are promised.
TEXTS = {
    "real.mtx": ("%%MatrixMarket matrix coordinate real general\n{0} {1} {2}\n", "1 {1} 5\n"),
    "pattern.mtx.gz": (
        "%%MatrixMarket matrix coordinate pattern general\n{0} {1} {2}\n", "{0} {1}\n"
    ),
    "array.mtx": ("%%MatrixMarket matrix array real general\n{0} {1}\n", "5\n"),
    "symmetric.mtx": (
        "%%MatrixMarket matrix coordinate integer symmetric\n{0} {0} {2}\n", "{0} 1 5\n"
    ),
    "list.csv": ("# shape: {0} x {1}\n", "0,0\n"),
    "list.txt.gz": ("# shape: {0} x {1}\n", "0 0 1\n"),
    "ids.txt": ("", "{1} {0}\n"),
}  # fmt: skip
KINDS = [*TEXTS, "graph", "coo.npz", "csr.npz", "csc.npz", "sgt.npz"]
FORMATS = ("csr", "csc", "sgt", "coo", None)
WISHES = ({}, {"max_bytes": LIMIT}, {"max_bytes": LIMIT, "index_dtype": "int64"})


def save(folder, kind, shape):
    """A file whose header promises the shape; what follows is short."""
    path = folder / f"ind.{shape[0]}.{shape[1]}.{kind}"
    n_entries = min(shape[2], 4)
    if kind == "graph":
        path.write_bytes(pickle.dumps({shape[0]: [shape[1]] * n_entries}))
    elif kind in TEXTS:
        head, line = (part.format(*shape) for part in TEXTS[kind])
        text = (head + line * n_entries).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    else:
        about = {"version": 1, "format": kind[:3], "values": None}
        about |= {"tile": (1, 8)} if kind == "sgt.npz" else {}
        arrays = members(kind[:3], shape[:2], n_entries)
        np.savez_compressed(path, shape=shape[:2], sparsefmt=json.dumps(about), **arrays)
    return str(path)


def members(format, shape, n_entries):
    """Arrays of which one says how many rows or columns there are, if they are not too many."""
    zeros = np.zeros(n_entries, np.int64)
    if format == "coo":
        return {"row": zeros, "col": zeros}
    major = shape[format == "csc"]
    pointers = np.append(np.zeros(major if major <= 2 * 10**6 else 1, np.int64), n_entries)
    if format != "sgt":
        return {"indptr": pointers, "indices": zeros}
    n_tiles = min(n_entries, 1)
    return {
        "window_ptr": np.minimum(pointers, n_tiles),
        "columns": np.array([[0] + [-1] * 7] * n_tiles, np.int64).reshape(-1, 8),
        "tile_ptr": np.array([0, n_entries][: n_tiles + 1]),
        "slots": np.zeros(n_entries, np.uint8),
        "order": np.arange(n_entries),
    }


CODE = """
import json, resource, sys, tracemalloc
from sparsefmt import SparseFmtError
from sparsefmt.io import read
limit, *known = sys.argv[1:]
for path in known:
    read(path, format="sgt"), read(path, format="csc")  # everything is imported
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + int(limit) + 2**27  # SciPy's threads map some
resource.setrlimit(resource.RLIMIT_AS, (most, most))
tracemalloc.start()

for line in sys.stdin:
    question = json.loads(line)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        answer = read(question["path"], format=question["format"], **question["options"]).format
        error = ""
    except SparseFmtError as refused:
        answer, error = type(refused).__name__, str(refused)
    peak = tracemalloc.get_traced_memory()[1] - before
    print(json.dumps(question | {"answer": answer, "error": error, "peak": peak}))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_no_header_takes_more_than_its_limit(tmp_path):
    known = [tmp_path / name for name in ("one.mtx", "two.csv", "three.npz")]
    for path in known:
        write(path, COO(*np.eye(2, dtype=np.int32), np.ones(2), shape=(2, 2)))
    files = [save(tmp_path, kind, shape) for shape, kind in itertools.product(SHAPES, KINDS)]
    places = itertools.product(range(len(files)), range(len(FORMATS)), range(len(WISHES)))
    asked = [
        {"path": files[file], "format": FORMATS[format], "options": WISHES[wish]}
        for file, format, wish in places
        if (file // len(KINDS) + file + format + wish) % 3 == 0  # shape, kind, format and wish
    ]  # a third of them, and every three of the four
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(LIMIT), *known],
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(answers)) == (0, len(asked)), done.stderr
    for one in answers:
        assert one["peak"] <= LIMIT + BUFFERS, one
        assert says_what_to_do(one) if one["error"] else one["format"] in (None, one["answer"]), one
    for kind in KINDS:  # some of each are read, and some refused
        of_kind = {bool(one["error"]) for one in answers if one["path"].endswith(kind)}
        assert of_kind == {False, True}, kind


def says_what_to_do(answer):
    error, mends = answer["error"], ("raise max_bytes", "mend the", ": give ", "integers from")
    kind_fits = answer["answer"] in ("OutOfMemoryError", "FileFormatError")
    return kind_fits and answer["path"] in error and any(mend in error for mend in mends)
