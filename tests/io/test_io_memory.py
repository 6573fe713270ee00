"""``max_bytes`` bounds the peak of reading, for every file kind and format; nothing is killed."""

import gzip
import itertools
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from sparsefmt import COO
from sparsefmt.errors import FileFormatError, OutOfMemoryError
from sparsefmt.io import memory, read, write

resource = pytest.importorskip("resource")
BUFFERS = 10 * 2**20  #: what ``read`` may take beside ``max_bytes``
LIMIT = 2**28
READ = ""

KINDS = {
    "real.mtx": ("%%MatrixMarket matrix coordinate real general\n{0} {1} {2}\n", "{0} {1} 5\n"),
    "pattern.mtx.gz": (
        "%%MatrixMarket matrix coordinate pattern general\n{0} {1} {2}\n", "{0} {1}\n"
    ),
    "array.mtx": ("%%MatrixMarket matrix array real general\n{0} {1}\n", "5\n"),
    "symmetric.mtx": (
        "%%MatrixMarket matrix coordinate integer symmetric\n{0} {0} {2}\n", "{0} {0} 5\n"
    ),
    "list.csv": ("# shape: {0} x {1}\n", "0,0\n"),
    "list.txt.gz": ("# shape: {0} x {1}\n", "0 0 1\n"),
    "ids.txt": ("", "{2} 1\n"),
    "coo.npz": ("", ""),
}  # fmt: skip
SHAPES = [
    (2 * 10**9, 2 * 10**9, 1),
    (2 * 10**8, 5, 1),
    (10**8, 10**8, 10**8),
    (2**40, 3, 1),
    (5, 2**52, 2),
]
FORMATS = ("csr", "csc", "sgt", "coo")


def save(path, kind, shape):
    head, body = KINDS[kind]
    if kind == "coo.npz":
        one = np.array([0], np.int64)
        size = np.array(shape[:2])
        np.savez(path, row=one, col=one, data=one * 1.0, shape=size, format=b"coo")
        return
    text = (head.format(*shape) + body.format(*shape)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


CODE = """
import json, resource, sys
from sparsefmt.io import read
from sparsefmt import SparseFmtError
import sparsefmt.formats.sgt, scipy.io, scipy.sparse
read(sys.argv[2], format="sgt"), read(sys.argv[3], format="csc")  # everything is imported
pages = int(open("/proc/self/statm").read().split()[0])
limit, room = int(sys.argv[1]), int(sys.argv[1]) + 2**27  # SciPy's threads map some
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
for line in sys.stdin:
    path, format, given = json.loads(line)
    try:
        A = read(path, format=format, **({"max_bytes": limit} if given else {}))
        print(json.dumps([path, format, "read", A.format]))
    except SparseFmtError as error:
        print(json.dumps([path, format, type(error).__name__, str(error)]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_no_header_takes_more_than_its_limit(tmp_path):
    for name in ("one.mtx", "two.csv"):
        write(tmp_path / name, COO(*np.eye(2, dtype=np.int32), np.ones(2), shape=(2, 2)))
    asked = []
    for (place, shape), kind in itertools.product(enumerate(SHAPES), KINDS):
        path = tmp_path / f"{place}.{kind}"
        save(path, kind, shape)
        asked += [[str(path), format, given] for format in FORMATS for given in (True, False)]
    command = [sys.executable, "-c", CODE, str(LIMIT), tmp_path / "one.mtx", tmp_path / "two.csv"]
    done = subprocess.run(
        command,
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(answers)) == (0, len(asked)), done.stderr
    assert len(SHAPES) * len(KINDS) == 40
    for path, format, kind, text in answers:
        if kind == "read":
            assert format == text
            continue
        assert kind in ("OutOfMemoryError", "FileFormatError"), text
        assert path in text
        assert any(mend in text for mend in ("raise max_bytes", "mend the", "vertices are")), text
    # What has one entry is read as COO, whatever its shape.
    one = [a for a in answers if a[1] == "coo" and a[0].endswith(("0.real.mtx", "3.coo.npz"))]
    assert [a[2] for a in one] == ["read"] * 4


def matrices():
    rng = np.random.default_rng(3)
    for n_rows, n_cols, nnz in [(2000, 3000, 300_000), (3_000_000, 40, 100), (40, 3_000_000, 100)]:
        row = rng.integers(0, n_rows, nnz).astype(np.int32)
        col = rng.integers(0, n_cols, nnz).astype(np.int32)
        yield COO(row, col, rng.integers(1, 9, nnz) * 1.0, shape=(n_rows, n_cols))


@pytest.mark.covering("name", "place", one_in=2)
@pytest.mark.parametrize(
    "name", ["a.mtx", "a.mtx.gz", "a.csv", "a.npz", "integer.mtx", "array.mtx"]
)
@pytest.mark.parametrize("place", range(3))
def test_reading_stays_within_its_limit_or_is_refused(tmp_path, name, place):
    A = list(matrices())[place]
    path = tmp_path / name
    if name == "array.mtx":
        cells = "\n".join(["0", "2.5"] * 100_000)
        path.write_text(f"%%MatrixMarket matrix array real general\n400 500\n{cells}\n")
    else:
        write(path, A)
    if name == "integer.mtx":
        path.write_bytes(path.read_bytes().replace(b"real general", b"integer general"))
    wishes = [{}, {"dtype": "float32"}, {"index_dtype": "int64"}]
    formats = ("sgt", "csr", "coo")
    if name.endswith(("csv", "gz")):  # slow under a trace
        wishes, formats = wishes[2:], formats[:1]
    for format, options in itertools.product(formats, wishes):
        for limit in (2**20, 2**23, 2**24, 2**25, 2**26, 2**31):
            refused = READ
            tracemalloc.start()
            try:
                read(path, format=format, max_bytes=limit, **options)
            except (OutOfMemoryError, FileFormatError) as error:
                refused = str(error)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= limit + BUFFERS, (format, options, limit, refused)
            assert refused is READ or "raise max_bytes" in refused
        assert refused is READ  # the last limit is large


def test_the_default_is_a_share_of_what_is_available(tmp_path, monkeypatch):
    group = tmp_path / "memory"
    group.mkdir()
    texts = {
        "/proc/meminfo": "MemAvailable:  4000000 kB\n",
        "/proc/self/cgroup": "0::/memory\n",
        str(group / "memory.max"): "max\n",
        str(tmp_path / "memory.max"): "1000000\n",
        str(tmp_path / "memory.current"): "500000\n",
        str(tmp_path / "memory.stat"): "anon 1\ninactive_file 100000\n",
    }
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_text", lambda path: texts.get(str(path), ""))
    assert memory.default_limit() == 300_000
    texts["/proc/self/cgroup"] = "3:memory:/\n2:cpu:/\n"
    texts[str(group / "memory.limit_in_bytes")] = "2000"
    texts[str(group / "memory.usage_in_bytes")] = "3000"
    assert memory.default_limit() == 0
