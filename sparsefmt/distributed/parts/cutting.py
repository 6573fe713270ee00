"""Graphs cut into parts, in a folder; the edges are read in pieces.

Nothing here needs torch.
"""

import errno
import io
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...errors import (
    DtypeError,
    FileFormatError,
    IndexRangeError,
    OutOfMemoryError,
    ShapeError,
    UnsupportedError,
)
from ...formats import checks, foreign
from ...formats.arrays import Array, allocating, as_array, to_device
from ...formats.base import Format
from ...formats.compressed import COO
from ...graph.graph import Graph
from ...io.bounded import check_regular, named
from ...io.chunks import LENGTH, Chunk, chunks_of, read_chunks
from ...io.memory import default_limit
from ...io.npz import mapped
from ...reorder import Order
from . import rows
from .files import EDGES, HEAD_BYTES, HEADER, MASKS, Partition, digest, edges_sum, rows_sum

#: What has edges: a path, a graph, or pieces; and data of vertices, or the path of a ``.npy``.
Pieces: TypeAlias = str | os.PathLike[str] | Graph | Format | Iterable[Any]
Data: TypeAlias = Array | str | os.PathLike[str]
#: Bytes of a vertex, without the arrays of a piece: its degree, its place in two orders, a sum.
_BYTES_A_VERTEX = 40
#: Bytes of an array that wait until they are written, so that a file is seldom opened.
_BUFFER = 4 << 20
#: Of the memory that may be used: bytes of the arrays of all parts that wait.
_BUFFER_SHARE = 0.25
#: Kinds of dtypes for data of vertices, and their names in errors; those of masks are bool.
_WANTED = {"features": ("f", "float16, float32 or float64"), "labels": ("iu", "integers")}
_CHANGED = "the graph changed while it was read: give what stays as it is."
_BY_NAME: dict[str, rows.Partitioner] = {"balanced": rows.balanced, "metis": rows.metis}


def write_partition(
    graph: Pieces,
    folder: str | os.PathLike[str],
    parts: int,
    *,
    partitioner: str | rows.Partitioner = "balanced",
    num_nodes: int | None = None,
    features: Data | None = None,
    labels: Data | None = None,
    masks: Mapping[str, Data] | None = None,
) -> Partition:
    """Cut a square graph into parts, and write a folder from which ranks read theirs.

    Parameters
    ----------
    graph : path, Graph, Format, or iterable of pieces
        A file of ``sparsefmt.read``; edge lists and the CSR of an ``.npz`` are read in pieces.  A
        piece is ``(source, target)`` or ``(source, target, weight)``, arrays of one length, and
        the pieces are gone over several times, so that a generator will not do.
    folder : path
        Empty, or not there yet; it appears once it is complete.
    parts : int
        From 1 to 8192.
    partitioner : "balanced", "metis" or a Partitioner
        "balanced" needs the degrees alone; all others have the whole structure in memory.
    num_nodes : int, optional
        By default what the graph says, or the largest number and one.
    features : array or path of a ``.npy``, shape (n, width), optional
        float16, float32 or float64.  Here and below: of the vertices by their numbers in ``graph``;
        a file is mapped into memory.
    labels : array or path of a ``.npy``, shape (n,), optional
        Integers; -1 is no label.
    masks : mapping of "train", "val", "test" to an array or path of a ``.npy``, optional
        bool, shape (n,).

    Returns
    -------
    Partition

    Raises
    ------
    ShapeError, DtypeError, IndexRangeError, FormatError
        If the arguments are not as above, or do not fit together.
    UnsupportedError
        If ``partitioner`` is unknown, METIS is not installed, or pieces cannot be had twice.
    FileFormatError
        If the folder holds something, or a file is malformed, or changes meanwhile.
    OutOfMemoryError
        If there are more vertices than memory has room for.
    OSError
        As the operating system reports it.

    Notes
    -----
    The edges of a part keep the order of the graph.  Two passes over the pieces, one that counts
    and one that writes, and one more for a partitioner that needs the structure.
    """
    target = named(folder)
    rows.check_count("parts", checks.integer("parts", parts, least=1))
    _check_new(target)
    edges = _Edges(graph, num_nodes)
    survey = _surveyed(edges)
    data = _vertex_data(features, labels, masks or {}, len(survey.degrees))
    order, bounds, by = _cut(partitioner, edges, survey, parts)
    with _appearing(target) as draft:
        writer = _Writer(draft, order, bounds)
        dtypes = writer.edges(edges, survey) | writer.vertices(data)
        if order is not None:
            writer.array("order.npy", np.dtype(np.int64), order.perm.shape, [order.perm])
        digits = {name: [rows_sum(a, _stored(name, a)), *a.shape] for name, a in data.items()}
        weights = survey.weights and survey.weights.name
        facts = {**digits, "edges": [survey.sum, survey.edges, weights], "n": len(survey.degrees)}
        partition = Partition(
            folder=target,
            bounds=bounds,
            edges=survey.edges,
            graph=digest(facts),
            by=by,
            dtypes=dtypes,
            width=data["features"].shape[1] if "features" in data else 0,
            classes=int(data["labels"].max(initial=-1)) + 1 if "labels" in data else 0,
            ordered=order is not None,
            sparsefmt=version(),
            files=writer.files(),
        )
        (draft / HEADER).write_text(partition.text())
    return partition


def version() -> str:
    """Return the version of this package, or "checkout" where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version("sparsefmt")
    except metadata.PackageNotFoundError:
        return "checkout"


class _Edges:
    """The edges of a user's graph, checked, in pieces, as often as they are iterated over."""

    def __init__(self, graph: Pieces, num_nodes: int | None) -> None:
        self.structure = None
        if num_nodes is not None:
            num_nodes = checks.integer("num_nodes", num_nodes, least=0)
        self.num_nodes = num_nodes
        if isinstance(graph, Graph | Format):
            self.structure = graph if isinstance(graph, Graph) else Graph(graph)
            coo = self.structure.structure.tocoo().to("cpu")
            self._pieces: Callable[[], Iterable[Any]] = lambda: chunks_of(coo)
        elif isinstance(graph, str | os.PathLike):
            self._pieces = lambda: read_chunks(graph, num_nodes=num_nodes)
        elif (  # can be gone over several times: no tensor, mapping or PyG's data
            not isinstance(graph, Mapping)
            and not hasattr(graph, "shape")
            and not hasattr(graph, "edge_index")
            and isinstance(graph, Iterable)
            and iter(graph) is not graph
        ):
            self._pieces = lambda: graph
        else:
            raise UnsupportedError(
                f"graph is a {type(graph).__name__}: give a path, a Graph, Graph.from_edge_index("
                "edge_index) for instance, a Format, or what can be gone over several times, a "
                "list of pieces (source, target) for instance."
            )

    def __iter__(self) -> Iterator[Chunk]:
        limit = np.iinfo(np.int64).max if self.num_nodes is None else self.num_nodes
        for piece in self._pieces():
            if not isinstance(piece, tuple | list) and getattr(piece, "ndim", 0) != 2:
                raise UnsupportedError(
                    f"graph has a {type(piece).__name__} as a piece: give (source, target) or "
                    "(source, target, weight)."
                )
            *ends, weight, shape = (*piece, None, None)[:4]
            source, target = (
                to_device(foreign.indices(name, end), "cpu")
                for name, end in zip(("source", "target"), ends, strict=True)
            )
            if weight is not None:
                weight = to_device(foreign.values("weight", weight), "cpu")
            lengths = {a.shape for a in (source, target, weight) if a is not None}
            if lengths != {(len(source),)}:
                raise ShapeError(
                    f"a piece has arrays of shape {', '.join(map(str, lengths))}: give source, "
                    "target and weight of one length."
                )
            for name, end in (("source", source), ("target", target)):
                if end.min(initial=0) < 0:
                    raise IndexRangeError(f"{name} holds {end.min()}: number vertices from 0.")
                checks.in_range(name, end, limit, "vertices")
            yield Chunk(source, target, weight, shape)


class _Survey(NamedTuple):
    """Facts of all edges."""

    degrees: Array  #: (n,) int64: edges to each vertex
    edges: int
    weights: np.dtype[Any] | None
    sum: int


def _surveyed(edges: _Edges) -> _Survey:
    """Count edges and degrees, in one pass."""
    degrees, count, total, top, shape = np.zeros(0, np.int64), 0, 0, 0, None
    kinds: set[Any] = set()
    for source, target, weight, known in edges:
        shape = known or shape
        total += edges_sum(source, target, weight)
        if len(source):
            kinds.add(None if weight is None else weight.dtype)
            top = max(top, int(source.max()) + 1, int(target.max()) + 1)
            _grow(degrees, top)
            np.add.at(degrees, target, 1)
        count += len(source)
    if len(kinds) > 1:
        raise DtypeError(f"weights are {' and '.join(map(str, kinds))}: give all pieces one dtype.")
    n = top if edges.num_nodes is None else edges.num_nodes
    if shape is not None:
        if shape[0] != shape[1]:
            raise ShapeError(f"the graph has shape {shape}: parts need a square one, n x n.")
        if edges.num_nodes not in (None, shape[0]):
            raise ShapeError(
                f"num_nodes is {edges.num_nodes} but the graph says {shape[0]} vertices: leave "
                "num_nodes out."
            )
        n = shape[0]
    _grow(degrees, n)
    return _Survey(degrees[:n], count, next(iter(kinds), None), total % 2**64)


def _grow(degrees: Array, n: int) -> None:
    """Add room to degrees in place, for ``n`` vertices and some to come."""
    if n <= len(degrees):
        return
    if n * _BYTES_A_VERTEX > default_limit():
        raise OutOfMemoryError(
            f"the graph has {n} vertices, more than there is memory for: number them from 0 "
            "without gaps, or cut it on a larger machine."
        )
    with allocating(f"degrees of {n} vertices"):
        degrees.resize(max(n, 2 * len(degrees)), refcheck=False)


def _vertex_data(
    features: Data | None, labels: Data | None, masks: Mapping[str, Data], n: int
) -> dict[str, Array]:
    """Check the arrays with a row for each vertex; return them by name."""
    if set(masks) - set(MASKS):
        raise UnsupportedError(f"masks are {', '.join(masks)}: name them train, val and test.")
    sources = {"features": features, "labels": labels, **masks}
    data = {name: _array(name, source) for name, source in sources.items() if source is not None}
    for name, array in data.items():
        if array.ndim != (2 if name == "features" else 1) or len(array) != n:
            shape = f"({n}, width)" if name == "features" else f"({n},)"
            raise ShapeError(
                f"{name} has shape {array.shape}: give {shape}, a row for each vertex."
            )
        kinds, want = _WANTED.get(name, ("b", "bool"))
        if array.dtype.kind not in kinds or array.dtype.itemsize > 8:
            raise DtypeError(f"{name} is {array.dtype}: give {want}.")
    if "labels" in data and data["labels"].min(initial=0) < -1:
        raise IndexRangeError("labels has values below -1: give classes from 0, or -1 for none.")
    return data


def _array(name: str, source: Data) -> Array:
    """Read an array, of a file mapped into memory."""
    if not isinstance(source, str | os.PathLike):
        return to_device(as_array(name, source), "cpu")
    path = named(source)
    check_regular(path)
    with path.open("rb") as file:
        return mapped(file, f"write {name} with numpy.save")


def _cut(
    partitioner: str | rows.Partitioner, edges: _Edges, survey: _Survey, parts: int
) -> tuple[Order | None, rows.Bounds, str]:
    """Choose the order of the vertices or None, and the bounds of the parts; name what cuts."""
    if partitioner == "balanced":
        return None, rows.bounds_of_degrees(survey.degrees, parts), "balanced"
    if isinstance(partitioner, str):
        if partitioner not in _BY_NAME:
            raise UnsupportedError(f"partitioner is {partitioner!r}: give 'balanced' or 'metis'.")
        by, partitioner = partitioner, _BY_NAME[partitioner]
    else:
        by = getattr(partitioner, "__name__", type(partitioner).__name__)
    result = partitioner(edges.structure or _joined(edges, survey), parts)
    if not isinstance(result, tuple | list) or not result:
        raise UnsupportedError(
            f"{by} gave a {type(result).__name__}: give the bounds of the parts, a tuple, or an "
            "Order and bounds."
        )
    order, bounds = result if isinstance(result[0], Order) else (None, result)
    bounds = rows.checked(bounds, parts)
    n = len(survey.degrees)
    if bounds[-1] != n or (order is not None and len(order) != n):
        raise ShapeError(f"{by} cut {bounds[-1]} vertices of {n}: it must cut all of them.")
    return order if order is None else order.to("cpu"), bounds, by


def _joined(edges: _Edges, survey: _Survey) -> Graph:
    """Build the structure of all pieces."""
    n = len(survey.degrees)
    index = foreign.index_dtype((n, n), survey.edges)
    with allocating(f"{survey.edges} edges of the graph, which this partitioner needs whole"):
        ends = np.empty((2, survey.edges), index)
        done = 0
        for source, target, *_ in edges:
            ends[:, done : done + len(source)] = source, target
            done += len(source)
    return Graph(COO(ends[1], ends[0], shape=(n, n)))


def _stored(name: str, array: Array) -> np.dtype[Any]:
    """Return the dtype in which data of vertices are written."""
    return np.dtype(np.int64) if name == "labels" else array.dtype


class _NewArray:
    """A ``.npy`` of known shape, opened to write several pieces; ``most`` bytes wait for that."""

    def __init__(
        self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], most: float
    ) -> None:
        self.path, self.dtype = path, dtype.newbyteorder("=")
        self.left, self._most = shape[0], most
        head, descr = io.BytesIO(), np.lib.format.dtype_to_descr(self.dtype)
        facts = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(head, facts)
        assert head.tell() == HEAD_BYTES  # by which readers count the edges of a folder
        self.size = self.crc = self.waiting = 0
        self._blocks: list[bytes] = []
        self._add(head.getvalue())

    def append(self, piece: Array) -> None:
        """Append rows to the file; their bytes may wait for ``write``."""
        self.left -= len(piece)
        self._add(np.ascontiguousarray(piece, self.dtype).tobytes())

    def write(self) -> None:
        """Write the bytes that wait."""
        with self.path.open("ab") as file:
            file.writelines(self._blocks)
        self._blocks.clear()
        self.waiting = 0

    def _add(self, block: bytes) -> None:
        """Add bytes; write them with others that wait."""
        self._blocks.append(block)
        self.waiting += len(block)
        self.size += len(block)
        self.crc = zlib.crc32(block, self.crc)
        if self.waiting >= self._most:
            self.write()


class _Writer:
    """The writer of the arrays of all parts, by their paths in the folder."""

    def __init__(self, folder: Path, order: Order | None, bounds: rows.Bounds) -> None:
        self.folder, self.order, self.bounds = folder, order, bounds
        n_arrays = len(EDGES) * (len(bounds) - 1)
        self._most = min(_BUFFER, _BUFFER_SHARE * default_limit() / n_arrays)
        self.arrays: dict[str, _NewArray] = {}
        for part in range(len(bounds) - 1):
            (folder / f"part{part}").mkdir()

    def files(self) -> dict[str, list[int]]:
        """Return sizes and checksums of the files; raise if rows are missing."""
        if any(array.left for array in self.arrays.values()):
            raise FileFormatError(_CHANGED)
        return {name: [array.size, array.crc] for name, array in self.arrays.items()}

    def array(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], pieces: Iterable[Array]
    ) -> None:
        """Write the pieces of an array to a file, and register it by its name."""
        self.arrays[name] = array = _NewArray(self.folder / name, dtype, shape, self._most)
        for piece in pieces:
            array.append(piece)
        array.write()

    def edges(self, edges: _Edges, survey: _Survey) -> dict[str, str]:
        """Write the edges to the vertices of each part; return dtypes by name."""
        n, cuts = self.bounds[-1], list(self.bounds)
        degrees = survey.degrees if self.order is None else survey.degrees[self.order.perm]
        counts = np.diff(np.append(0, np.cumsum(degrees))[cuts])
        index = foreign.index_dtype((n, n), 0)
        dtypes = {"source": index, "target": index}
        dtypes |= {"weight": survey.weights} if survey.weights else {}
        for part, count in enumerate(counts.tolist()):
            for name, dtype in dtypes.items():
                self.array(f"part{part}/{name}.npy", dtype, (count,), ())
        for chunk in edges:
            self._append(chunk)
        for array in self.arrays.values():
            array.write()
        return {name: dtype.name for name, dtype in dtypes.items()}

    def _append(self, chunk: Chunk) -> None:
        """Add the edges of a piece to the arrays of their parts."""
        source, target, weight, _ = chunk
        if max(source.max(initial=0), target.max(initial=0)) >= max(self.bounds[-1], 1):
            raise FileFormatError(_CHANGED)
        if self.order is not None:
            source, target = self.order.inverse[source], self.order.inverse[target]
        part: Array = np.searchsorted(self.bounds, target, side="right") - 1
        by_part = np.argsort(part, kind="stable")
        ends = np.searchsorted(part[by_part], np.arange(len(self.bounds)))
        for number, (first, last) in enumerate(pairwise(ends.tolist())):
            for name, end in (("source", source), ("target", target), ("weight", weight)):
                array = self.arrays.get(f"part{number}/{name}.npy")
                if array is not None and end is not None and first < last:
                    array.append(end[by_part[first:last]])

    def vertices(self, data: dict[str, Array]) -> dict[str, str]:
        """Write the rows of the vertices of each part; return dtypes by name."""
        for name, array in data.items():
            width = int(np.prod(array.shape[1:]))
            step = max(LENGTH // max(width, 1), 1)
            for part, (first, last) in enumerate(pairwise(self.bounds)):
                starts = range(first, last, step)
                places = (slice(start, min(start + step, last)) for start in starts)
                pieces = (array[at if self.order is None else self.order.perm[at]] for at in places)
                shape = (last - first, *array.shape[1:])
                self.array(f"part{part}/{name}.npy", _stored(name, array), shape, pieces)
        return {name: _stored(name, array).name for name, array in data.items()}


def _check_new(folder: Path) -> None:
    """Raise for a folder that holds something, or has no parent."""
    check_regular(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileFormatError(f"{folder} is there already: give another name, or remove it.")
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder.absolute().parent))


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its name once all is in it, and is removed after an error."""
    target = folder.resolve()
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    draft.mkdir()
    try:
        yield draft
        draft.replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
