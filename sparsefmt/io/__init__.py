"""Readers and writers of graph files: Matrix Market, ``.npz``, edge lists and Planetoid folders.

No file is ever trusted: nothing in it is executed, declared sizes are checked before anything is
allocated, and an error names the file, the line or member, and the mend.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import IndexRangeError, ShapeError, UnsupportedError
from ..formats import checks
from ..formats.arrays import DType, allocating
from ..formats.base import Format, FormatName
from ..formats.sgt import SGT, check_tile
from . import edge_list, matrix_market, memory, npz, planetoid, signature
from .bounded import check_regular, named, naming, stem_and_suffix
from .planetoid import Planetoid as Planetoid

_EDGE_LISTS = (".csv", ".tsv", ".txt", ".edges")
_FORMATS = ("coo", "csr", "csc", "sgt", "cbsr")


def read(
    path: str | os.PathLike[str],
    *,
    format: FormatName | None = "csr",
    dtype: DType = None,
    index_dtype: DType = None,
    tile: tuple[int, int] | None = None,
    num_nodes: int | None = None,
    max_bytes: int | None = None,
) -> Any:
    """Read a sparse matrix from a file, in the file format of the name's ending.

    ========================================  ====================================================
    ``.mtx``, ``.mtx.gz``, ``.mtx.bz2``       Matrix Market, through ``scipy.io``
    ``.npz``                                  written by ``write``, by ``scipy.sparse.save_npz``,
                                              or plain ``indptr``, ``indices``, ``shape`` and, if
                                              weighted, ``data`` of a CSR (other members ignored)
    ``.csv .tsv .txt .edges``, also packed    lines ``source target [weight]``, ids from 0
    a folder, ``ind.<name>.graph``            Planetoid's raw files: the graph alone
    ========================================  ====================================================

    Parameters
    ----------
    path : path of a file or folder
    format : "csr", "csc", "coo", "sgt", "cbsr" or None
        What to return; None for the format in which the file stores the matrix (COO for text).
        "cbsr" only where that is what it stores.
    dtype : float16, bfloat16, float32 or float64, optional
        Round values to this dtype.  By default floats keep theirs (decimal numbers are float64),
        and integers and booleans become float64, which must be exact.
    index_dtype : int32 or int64, optional
        By default that of the file; for text int32 unless the matrix needs int64.
    tile : (height, width), optional
        For ``format="sgt"``; (16, 8) unless the file stores tiles of another shape.
    num_nodes : int, optional
        For edge lists: the matrix is ``num_nodes`` x ``num_nodes``.  By default what a line
        ``# shape: rows x columns`` says, else the largest id plus one.
    max_bytes : int, optional
        Refuse a file whose reading would take more memory than this at its peak, conversions and
        casts counted, beside 10 MiB of buffers.  By default half of what the machine, the limits
        of its containers (cgroups) and those of the process (``ulimit -v``) leave.

    Returns
    -------
    Format
        On the CPU.  Explicit zeros, duplicates and the order of entries are kept; pattern files
        and lists of two columns are unweighted (``data is None``).  A dense ``array`` file of
        Matrix Market gives its nonzero cells, and a symmetric one both halves.

    Raises
    ------
    FileFormatError
        If the file is malformed, truncated, lies about its sizes, holds integers that float64
        cannot represent (pass ``dtype``) or numbers beyond its range, or is larger than allowed;
        if it holds something else than its ending says (JSON in a ``.csv``), or no edge although
        it does not say that it is empty; or if no file can have this name.
    UnsupportedError
        If the ending, the format of the matrix or complex values are not supported, or the path
        is that of a device, pipe or socket.
    IndexRangeError
        If ``index_dtype`` is int32 and the matrix needs int64.
    OutOfMemoryError
        If memory runs out, or the conversion would pass ``max_bytes`` although the file does
        not: a matrix of 2**40 rows with three entries can be read as COO, but not as CSR.
    FileNotFoundError, OSError
        As the operating system reports them.
    """
    source = named(path)
    limit, options = _options(format, dtype, index_dtype, tile, num_nodes, max_bytes)
    kind = file_kind(source)
    if num_nodes is not None and kind != "edge list":
        raise UnsupportedError(f"num_nodes is for edge lists, and {source} is a {kind} file.")
    check_files(source, kind)
    A: Format
    with naming(source), allocating(f"{source}: reading it needs too much memory"):
        signature.check(source, kind)
        if kind == "edge list":
            A = edge_list.read_edge_list(source, dtype=dtype, max_bytes=limit, num_nodes=num_nodes)
        elif kind == "Planetoid":
            A = planetoid.read_graph(source, max_bytes=limit)
        elif kind == "Matrix Market":
            A = matrix_market.read_matrix_market(source, dtype=dtype, max_bytes=limit)
        else:
            A = npz.read_npz(source, dtype=dtype, max_bytes=limit)
    with allocating(f"{source}: reading it as {format} needs too much memory"):
        return _in_format(source, A, format or A.format, index_dtype, options, limit)


def write(path: str | os.PathLike[str], A: Format, *, compressed: bool = False) -> None:
    """Write a sparse matrix to a file, in the file format of the name's ending, as for ``read``.

    The file appears, or changes, only once it is complete.

    Parameters
    ----------
    path : path of a file
        ``.npz`` keeps the format, its dtypes and tiles; text formats keep the entries (values as
        float64, so that float16, bfloat16 and float32 come back exactly with ``dtype=``).
        ``.gz`` and ``.bz2`` behind the ending of a text format compress it.
    A : COO, CSR, CSC, SGT or CBSR
        On any device.
    compressed : bool
        Deflate the members of an ``.npz``; smaller, but several times slower.

    Raises
    ------
    UnsupportedError
        If the ending is not known, ``A`` is no format, ``compressed`` is set for text, an edge
        list would hold a vertex from 2**53 on, or the path is that of a device, pipe or socket.
    FileFormatError
        If no file can have this name.
    OSError
        As the operating system reports it.
    """
    target = named(path)
    if not isinstance(A, Format):
        raise UnsupportedError(
            f"A is a {type(A).__name__}: give a COO, CSR, CSC, SGT or CBSR (a Graph's is .csr)."
        )
    kind = file_kind(target)
    if kind == "Planetoid":
        raise UnsupportedError(f"{target}: Planetoid files are only read; write .npz instead.")
    check_regular(target)
    if kind == "npz":
        npz.write_npz(target, A, compressed=compressed)
    elif compressed:
        raise UnsupportedError(f"compressed is for .npz; name the file {target.name}.gz instead.")
    elif kind == "edge list":
        edge_list.write_edge_list(target, A)
    else:
        matrix_market.write_matrix_market(target, A)


def read_planetoid(path: str | os.PathLike[str], *, max_bytes: int | None = None) -> Planetoid:
    """Read graph, features, labels and public split of a raw Planetoid data set.

    Parameters
    ----------
    path : path of a folder, or of its ``ind.<name>.graph``
        Beside it lie ``.x .tx .allx .y .ty .ally`` and ``.test.index``.  They are pickles, of
        which nothing is executed: all but plain arrays, CSR matrices and dictionaries is refused.
    max_bytes : int, optional
        Refuse files that hold or declare more than this; by default as for ``read``.

    Returns
    -------
    Planetoid
        ``graph`` symmetric, without duplicates and self-loops; ``x`` as CSR or dense, not
        normalised; ``y`` int64, -1 without label; ``train_mask``, ``val_mask``, ``test_mask``.
        Test vertices that the files leave out (CiteSeer has 15) have no features and label -1.

    Raises
    ------
    FileFormatError
        If a file is malformed, asks for code to be run, or does not fit the others; or if no file
        can have this name.
    UnsupportedError
        If one is a device, pipe or socket.
    OutOfMemoryError
        If memory runs out.
    FileNotFoundError, OSError
        As the operating system reports them.
    """
    source = named(path)
    limit = _limit(max_bytes)
    check_files(source, "Planetoid")
    with allocating(f"{source}: reading it needs too much memory"):
        return planetoid.read_all(source, max_bytes=limit)


def file_kind(path: Path) -> str:
    """Return the kind of a path: "Matrix Market", "npz", "edge list" or "Planetoid".

    Raises
    ------
    UnsupportedError
        If the ending is not known; the file need not exist.
    """
    suffix, packed = stem_and_suffix(path)
    if path.is_dir() or (path.name.startswith("ind.") and suffix == ".graph"):
        return "Planetoid"
    if suffix == ".mtx":
        return "Matrix Market"
    if suffix == ".npz" and not packed:
        return "npz"
    if suffix in _EDGE_LISTS:
        return "edge list"
    raise UnsupportedError(
        f"{path}: the ending {suffix + packed!r} is not known: use .mtx, .npz, .csv, .tsv, .txt or "
        ".edges (.gz or .bz2 behind it for text), or a folder of Planetoid files."
    )


def check_files(source: Path, kind: str) -> None:
    """Check that a path, and the parts of a Planetoid set, are regular files."""
    check_regular(source)
    if kind == "Planetoid":
        folder = source if source.is_dir() else source.parent
        for part in folder.glob("ind.*"):
            check_regular(part)


def _options(
    format: str | None,
    dtype: DType,
    index_dtype: DType,
    tile: object,
    num_nodes: object,
    max_bytes: int | None,
) -> tuple[int, dict[str, Any]]:
    """Check the arguments of ``read``; return the limit of bytes and options of the conversion."""
    if format is not None and format not in _FORMATS:
        raise UnsupportedError(f"format is {format!r}: use one of {', '.join(_FORMATS)}, or None.")
    if dtype is not None:
        checks.value_dtype("dtype", dtype)
    if index_dtype is not None:
        checks.index_dtype("index_dtype", index_dtype)
    if tile is not None and format != "sgt":
        raise UnsupportedError(f'tile is {tile!r} but format is {format!r}: only "sgt" has tiles.')
    if num_nodes is not None:
        _positive("num_nodes", num_nodes)
    options = {} if tile is None else {"tile": check_tile(tile)}
    return _limit(max_bytes), options


def _limit(max_bytes: int | None) -> int:
    return memory.default_limit() if max_bytes is None else _positive("max_bytes", max_bytes)


def _positive(name: str, value: object) -> int:
    number = checks.integer(name, value)
    if number < 0:
        raise ShapeError(f"{name} is {number}: it cannot be negative.")
    return number


def _in_format(
    path: Path,
    A: Format,
    format: FormatName,
    index_dtype: DType,
    options: dict[str, Any],
    max_bytes: int,
) -> Any:
    if isinstance(A, SGT) and format == "sgt":
        options = {"tile": A.tile, **options}
    itemsize = np.dtype(index_dtype or A.index_dtype).itemsize
    try:
        memory.check_conversion(path, A, format, itemsize, options.get("tile"), max_bytes)
        B = A.asformat(format, **options)
        return B if index_dtype is None else B.astype(index_dtype=index_dtype)
    except (IndexRangeError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error}") from error
