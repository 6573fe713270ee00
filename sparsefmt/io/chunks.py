"""Edges of a file in pieces, for graphs larger than memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..formats.arrays import Array, allocating
from ..formats.compressed import COO
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


def read_chunks(path: str | os.PathLike[str], *, num_nodes: int | None = None) -> Iterator[Chunk]:
    """Yield the edges of a graph file in pieces, as ``sparsefmt.read`` reads them.

    Edge lists, and the CSR of an ``.npz`` but for ``indptr``, are read in pieces; all other files
    are read in full and cut.

    Parameters
    ----------
    path : path of a file or folder
    num_nodes : int, optional
        Of edge lists, as for ``sparsefmt.read``; other files say it themselves.

    Yields
    ------
    Chunk
        At least one, and the last one knows the shape.

    Raises
    ------
    FileFormatError, UnsupportedError, OutOfMemoryError, OSError
        As ``sparsefmt.read``; a fault further back is raised when it is reached.
    """
    source = named(path)
    kind = file_kind(source)
    check_files(source, kind)
    with naming(source):
        signature.check(source, kind)
        if kind == "edge list":
            yield from _edge_list_chunks(source, num_nodes)
            return
        blocks = None
        if kind == "npz":
            blocks = npz.csr_blocks(source, LENGTH, max_bytes=memory.default_limit())
        if blocks is None:
            yield from chunks_of(read(source, format="coo"))
        else:
            yield from _csr_chunks(source, blocks)


def _edge_list_chunks(path: Path, num_nodes: int | None) -> Iterator[Chunk]:
    with allocating(f"{path}: a block of edges"):
        for table, shape in edge_list.edge_list_blocks(path, num_nodes=num_nodes):
            source, target = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
            weight = np.ascontiguousarray(table[:, 2]) if table.shape[1] == 3 else None
            yield Chunk(source, target, weight, shape)


def _csr_chunks(path: Path, blocks: Iterator[Any]) -> Iterator[Chunk]:
    empty = True
    for shape, row, col, data in blocks:
        empty = False
        yield Chunk(col, row, data, shape)
    if empty:
        yield from chunks_of(read(path, format="coo"))


def chunks_of(A: COO) -> Iterator[Chunk]:
    """Yield the entries of a matrix in pieces."""
    for start in range(0, max(A.nnz, 1), LENGTH):
        part = slice(start, start + LENGTH)
        data = None if A.data is None else A.data[part]
        yield Chunk(A.col[part], A.row[part], data, A.shape)
