"""Limits of memory for ``read``: the default of ``max_bytes``, the check of a conversion."""

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ..errors import OutOfMemoryError
from ..formats import convert, foreign
from ..formats.base import Format, FormatName
from ..formats.sgt import DEFAULT_TILE, slot_dtype

#: What ``read`` takes of the available memory by default.
SHARE = 0.5
#: Peak of one conversion over input plus output: tests/formats/test_conversion_memory.py.
FACTOR = 2.5
_CGROUPS = Path("/sys/fs/cgroup")


def default_limit() -> int:
    """Return half of the memory left to this process, limits of cgroups and ulimit counted."""
    return int(SHARE * max(min(_available()), 0))


def _available() -> Iterator[int]:
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    yield page * os.sysconf("SC_PHYS_PAGES") if page else 2**34
    match = re.search(r"MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")))
    if match:
        yield int(match[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        pages = _text(Path("/proc/self/statm")).split()[:1]
        yield limit - (int(pages[0]) * page if pages else 0)
    yield from _cgroups()


def _cgroups() -> Iterator[int]:
    """Yield the bytes that each group around this process leaves, in either kernel interface."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = _CGROUPS / controllers
        most, now = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if not controllers:
            most, now = ("memory.max", "memory.current")
        group = root / name.strip("/")
        for folder in (group, *group.parents):
            limit, used = (_text(folder / file).strip() for file in (most, now))
            if limit.isdecimal() and used.isdecimal():
                cache = re.search(r"^inactive_file (\d+)", _text(folder / "memory.stat"), re.M)
                yield int(limit) - int(used) + (int(cache[1]) if cache else 0)
            if folder == root:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_conversion(
    path: Path,
    A: Format,
    format: FormatName,
    itemsize: int,
    tile: tuple[int, int] | None,
    limit: int,
) -> None:
    """Raise if a conversion, and a cast of its indices, would take more than ``limit`` bytes."""
    narrow = A.index_dtype.itemsize
    index = max(narrow, foreign.index_dtype(A.shape, A.nnz).itemsize) if narrow < 4 else narrow
    steps = [A.nbytes, *(_size(A, step, index, tile) for step in convert.steps(A, format, tile))]
    # Two of a path's formats are converted at a time; the first one is kept by its reader.
    peak = max((FACTOR * (a + b) for a, b in pairwise(steps)), default=0)
    peak += steps[0] * (len(steps) > 2)
    if itemsize != narrow:
        peak = max(peak, 2 * sum(steps) + 2 * _size(A, format, itemsize, tile))
    if peak > limit:
        raise OutOfMemoryError(
            f"{path}: its {A.format} of {A.n_rows} x {A.n_cols} with {A.nnz} entries as {format} "
            f"takes {int(peak)} bytes, more than max_bytes={limit}: read it with "
            f'format="{A.format}", or raise max_bytes.'
        )


def _size(A: Format, format: str, index: int, tile: tuple[int, int] | None) -> int:
    """Return the most bytes that ``A`` takes in a format."""
    values = 0 if A.dtype is None else A.dtype.itemsize
    majors = {"csr": A.n_rows + 1, "csc": A.n_cols + 1, "coo": A.nnz}
    if format in majors:
        return majors[format] * index + A.nnz * (index + values)
    if format != "sgt":
        return A.nbytes
    height, width = tile or DEFAULT_TILE
    windows = -(-A.n_rows // height)
    tiles = min(A.nnz, windows * -(-A.n_cols // width), windows + A.nnz // width)
    slots = slot_dtype((height, width)).itemsize
    return (windows + tiles * (1 + width) + 2) * index + A.nnz * (slots + index + values)
