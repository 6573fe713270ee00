"""``max_bytes`` bounds the peak of reading what is there, for every file kind and format."""

import itertools
import tracemalloc

import numpy as np
import pytest

from sparsefmt import CBSR, COO
from sparsefmt.errors import FileFormatError, OutOfMemoryError
from sparsefmt.io import memory, read, write

BUFFERS = 10 * 2**20  #: what ``read`` may take beside ``max_bytes``
READ = ""


def refusal(path, limit, **options):
    """Read within a limit; why it was refused, if it was."""
    refused = READ
    tracemalloc.start()
    try:
        read(path, max_bytes=limit, **options)
    except (OutOfMemoryError, FileFormatError) as error:
        refused = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= limit + BUFFERS, (path.name, options, limit, refused)
    assert refused is READ or "raise max_bytes" in refused
    return refused


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
            refused = refusal(path, limit, format=format, **options)
        assert refused is READ  # the last limit is large


def stored(format):
    """Matrices with many entries, and with many rows."""
    if format == "cbsr":
        indices = np.tile(np.arange(8, dtype=np.uint8), (200_000, 1))
        return [CBSR(indices, np.ones(indices.shape, np.float32), shape=(200_000, 200))]
    rng = np.random.default_rng(3)
    shapes = [(2000, 3000, 1_500_000), (3_000_000, 40, 100)]
    drawn = [(rng.integers(0, n, nnz), rng.integers(0, m, nnz), n, m) for n, m, nnz in shapes]
    return [COO(row, col, shape=(n, m)).asformat(format) for row, col, n, m in drawn]


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt", "cbsr"])
def test_archives_of_every_format_stay_within_their_limit(tmp_path, format):
    """Whatever the limit, from one that is too small to one that is large enough."""
    path = tmp_path / "a.npz"
    for A, goal in itertools.product(stored(format), ("coo", "csr", "csc", "sgt")):
        write(path, A)
        limit, refused = 2**20, "not yet"
        while refused is not READ:
            limit *= 2
            refused = refusal(path, limit, format=goal)
            assert limit < 2**30


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
    texts[str(group / "memory.current")] = "900000\n"  # of a group without a limit
    assert memory.default_limit() == 300_000
    texts["/proc/self/cgroup"] = "0::/memory/a:b\n"
    assert memory.default_limit() == 300_000
    texts["/proc/self/cgroup"] = "3:memory:/\n2:cpu:/\n"
    texts[str(group / "memory.limit_in_bytes")] = "2000"
    texts[str(group / "memory.usage_in_bytes")] = "3000"
    assert memory.default_limit() == 0
