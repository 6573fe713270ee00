"""Edges of a file in pieces: a graph that is larger than memory can be read so."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..formats.arrays import Array
from . import check_files, edge_list, file_kind, memory, npz, read, signature
from .bounded import named, naming

#: Edges of a piece.
LENGTH = 1 << 20


class Chunk(NamedTuple):
    """Some edges of a graph, in the order of the file."""

    source: Array  #: (edges,) columns of the matrix, int32 or int64
    target: Array  #: (edges,) rows
    weight: Array | None  #: (edges,) values
    shape: tuple[int, int] | None  #: of the whole matrix, as far as it is known by then


def read_chunks(path: str | os.PathLike[str]) -> Iterator[Chunk]:
    """Read a graph file of ``sparsefmt.read`` in pieces.

    Edge lists, and the CSR of an ``.npz``, of which ``indptr`` alone is held, are never whole in
    memory; all others are read whole and cut.

    Parameters
    ----------
    path : path of a file or folder

    Yields
    ------
    Chunk
        At least one, and the last one knows the shape.

    Raises
    ------
    FileFormatError, UnsupportedError, OutOfMemoryError, OSError
        As ``sparsefmt.read``; what is wrong further back, once it is reached.
    """
    source = named(path)
    kind = file_kind(source)
    check_files(source, kind)
    signature.check(source, kind)
    with naming(source):
        if kind == "edge list":
            yield from _of_lines(source)
            return
        found = None
        if kind == "npz":
            found = npz.csr_blocks(source, LENGTH, max_bytes=memory.default_limit())
        yield from _whole(source) if found is None else _of_csr(source, found)


def _of_lines(path: Path) -> Iterator[Chunk]:
    for table, shape in edge_list.edge_list_blocks(path):
        source, target = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        weight = np.ascontiguousarray(table[:, 2]) if table.shape[1] == 3 else None
        yield Chunk(source, target, weight, shape)


def _of_csr(path: Path, found: Iterator[Any]) -> Iterator[Chunk]:
    empty = True
    for shape, row, col, data in found:
        empty = False
        yield Chunk(col, row, data, shape)
    if empty:
        yield from _whole(path)


def _whole(path: Path) -> Iterator[Chunk]:
    A = read(path, format="coo")
    for start in range(0, max(A.nnz, 1), LENGTH):
        part = slice(start, start + LENGTH)
        data = None if A.data is None else A.data[part]
        yield Chunk(A.col[part], A.row[part], data, A.shape)
