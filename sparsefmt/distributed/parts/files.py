"""A graph in a folder, cut into parts that ranks read: ``partition.json`` and a folder a part.

``partition.json`` says what there is, with the size and the CRC-32 of every other file, and a
checksum over all that it says (since format 2; folders of format 1 are read without).  A part has
the edges to its vertices, ``source.npy`` and ``target.npy``, with the numbers that vertices have in
the folder, and as far as they are there ``weight.npy``, ``features.npy``, ``labels.npy``,
``train.npy``, ``val.npy`` and ``test.npy``.  ``order.npy`` has the first number of each vertex, if
the vertices were put into another order.  Nothing here needs torch.
"""

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, field, fields
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ... import _random
from ...errors import FileFormatError, ShapeError, UnsupportedError
from ...formats import checks
from ...formats.arrays import Array
from ...io import checksums
from ...io.bounded import check_regular, fault, named, naming
from ...io.npz import mapped
from .rows import Bounds, check_count, checked

FORMAT = 2
HEADER = "partition.json"
MASKS = ("train", "val", "test")
EDGES = ("source", "target", "weight")
#: Dtypes of the arrays of a part, by name.
_ALLOWED = {
    **dict.fromkeys(("source", "target"), ("int32", "int64")),
    **dict.fromkeys(("weight", "features"), ("float16", "float32", "float64")),
    **dict.fromkeys(("labels",), ("int64",)),
    **dict.fromkeys(MASKS, ("bool",)),
}
_MEND = "copy the folder again, or write it with sparsefmt partition"
_MOST = 5 << 20  # bytes of a header: 8 arrays of 8192 parts take 4 MB
HEAD_BYTES = 128  # of a .npy before its numbers, as NumPy writes them
_BLOCK = 1 << 22  # bytes of a file
_NUMBERS = 1 << 20  # of an array that are summed together


@dataclass(frozen=True)
class Partition:
    """The facts of a graph in parts, as ``partition.json`` has them."""

    folder: Path
    bounds: Bounds  #: the first vertex of each part, and the number of vertices
    edges: int  #: of the whole graph
    graph: str  #: fingerprint of edges and data, whatever the parts and the order
    by: str  #: how it was cut
    dtypes: dict[str, str]  #: of each array that the parts have, by its name
    width: int = 0  #: of the features
    classes: int = 0  #: largest label and one
    ordered: bool = False  #: whether vertices were put into another order
    sparsefmt: str = ""  #: version that wrote it
    files: dict[str, list[int]] = field(default_factory=dict)  #: bytes and CRC-32 by path

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return len(self.bounds) - 1

    @property
    def vertices(self) -> int:
        """Return the number of vertices."""
        return self.bounds[-1]

    @property
    def fingerprint(self) -> str:
        """Return 32 digits that tell folders apart: of parts, order and the contents of files."""
        return digest(self._facts())

    def text(self) -> str:
        """Write the text of ``partition.json``."""
        facts = {"format": FORMAT, **self._facts()}
        return json.dumps({**facts, checksums.NAME: checksums.checksum(facts)}, indent=1)

    def _facts(self) -> dict[str, Any]:
        """Return all fields but the folder."""
        facts = asdict(self)
        del facts["folder"]
        return facts

    def order(self) -> Array | None:
        """Read the first number of each vertex, (n,); None where they have not changed."""
        if not self.ordered:
            return None
        return load(self, "order.npy", np.dtype(np.int64), (self.vertices,))


@dataclass(frozen=True, eq=False)
class Part:
    """The share of a rank in a graph: one part, or several neighbouring ones."""

    rank: int
    bounds: Bounds  #: of the ranks
    edge_index: Array  #: (2, edges) int64: sources, and targets, all vertices of this rank
    edge_weight: Array | None  #: (edges,)
    features: Array | None  #: (vertices, width)
    labels: Array | None  #: (vertices,) int64, -1 without a label
    masks: dict[str, Array]  #: (vertices,) bool, those there are of "train", "val" and "test"


def read_partition(folder: str | os.PathLike[str]) -> Partition:
    """Read the facts of a folder of parts: ``partition.json`` alone.

    Parameters
    ----------
    folder : path
        Written by ``write_partition``.

    Returns
    -------
    Partition

    Raises
    ------
    FileFormatError
        If it is none, or damaged.
    UnsupportedError
        If a later version of this package wrote it, or ``partition.json`` is a device or pipe.
    FileNotFoundError, OSError
        As the operating system reports them.
    """
    home = named(folder)
    path = home / HEADER
    check_regular(home)
    if home.exists() and not home.is_dir():
        raise fault(home, "it is no folder: give one of sparsefmt partition.")
    check_regular(path)
    if not path.exists():
        raise fault(home, f"there is no {HEADER} in it: give a folder of sparsefmt partition.")
    if path.stat().st_size > _MOST:
        raise fault(path, f"it has more than {_MOST} bytes: {_MEND}.")
    try:
        facts = json.loads(path.read_bytes())
        version = facts["format"]
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise fault(path, f"it is no JSON of a partition: {_MEND}.") from error
    if isinstance(version, int) and version > FORMAT:
        raise UnsupportedError(
            f"{path}: format {version}, and this sparsefmt knows {FORMAT}: update sparsefmt."
        )
    checksums.verify(path, facts, _MEND, needed=version == FORMAT)
    try:
        return _checked(home, facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FileFormatError):
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise fault(path, f"it contradicts itself ({why[:200]}): {_MEND}.") from error


def _checked(home: Path, facts: dict[str, Any]) -> Partition:
    """Build a Partition from its facts; raise ValueError or the like if they do not fit."""
    version = facts.pop("format")
    facts.pop(checksums.NAME, None)
    names = {item.name for item in fields(Partition)} - {"folder"}
    if type(version) is not int or not 1 <= version <= FORMAT or facts.keys() != names:
        raise ValueError(f"format {version!r} with {', '.join(facts)}")
    bounds = facts.pop("bounds")
    check_count("the number of parts", len(bounds) - 1)
    result = Partition(folder=home, bounds=checked(bounds, len(bounds) - 1), **facts)
    counts = [result.edges, result.width, result.classes]
    counts += [n for size, crc in result.files.values() for n in (size, crc)]
    if any(type(n) is not int or n < 0 for n in counts) or not isinstance(result.graph, str):
        raise ValueError("sizes that are no numbers")
    for name, dtype in result.dtypes.items():
        if dtype not in _ALLOWED[name]:
            raise ValueError(f"{name} of {dtype}")
    names = {"order.npy"} if result.ordered else set()
    names |= {f"part{p}/{name}.npy" for p in range(result.parts) for name in result.dtypes}
    missing = sorted(names - result.files.keys())
    if result.parts < 1 or not set(EDGES[:2]) <= result.dtypes.keys() or missing:
        raise ValueError(f"no {', '.join(missing[:3])}")
    for name in set(EDGES) & result.dtypes.keys():
        sizes = [result.files[f"part{p}/{name}.npy"][0] - HEAD_BYTES for p in range(result.parts)]
        if sum(sizes) != result.edges * np.dtype(result.dtypes[name]).itemsize:
            raise ValueError(f"edges is {result.edges} but {name}.npy have {sum(sizes)} bytes")
    return result


def read_part(
    folder: str | os.PathLike[str] | Partition, rank: int, ranks: int | None = None
) -> Part:
    """Read the share of a rank from a folder of parts.

    With fewer ranks than parts each has several neighbouring ones: rank ``r`` those from
    ``r * parts // ranks`` to before ``(r + 1) * parts // ranks``.

    Parameters
    ----------
    folder : path or Partition
    rank : int
        From 0 to ``ranks - 1``.
    ranks : int, optional
        As many as there are parts by default.

    Returns
    -------
    Part
        Features of a single part stay in the file, mapped into memory.

    Raises
    ------
    ShapeError
        If there are more ranks than parts, or ``rank`` is none of them.
    FileFormatError
        If a file is missing or damaged, or does not fit ``partition.json``.
    OSError
        As the operating system reports it.
    """
    partition = folder if isinstance(folder, Partition) else read_partition(folder)
    ranks = partition.parts if ranks is None else checks.integer("ranks", ranks, least=1)
    check_ranks(partition, ranks)
    if not 0 <= checks.integer("rank", rank) < ranks:
        raise ShapeError(f"rank is {rank}: give one from 0 to {ranks - 1}.")
    firsts = [r * partition.parts // ranks for r in range(ranks + 1)]
    parts = range(firsts[rank], firsts[rank + 1])
    arrays = {name: _joined(partition, name, parts) for name in partition.dtypes}
    if len({len(arrays[name]) for name in EDGES if name in arrays}) > 1:
        raise fault(partition.folder / f"part{parts[0]}", f"edges lack an end or weight: {_MEND}.")
    edges = np.stack([arrays["source"], arrays["target"]]).astype(np.int64, copy=False)
    bounds = tuple(partition.bounds[first] for first in firsts)
    for end, low, high in ((0, 0, bounds[-1]), (1, bounds[rank], bounds[rank + 1])):
        if edges.size and not (low <= edges[end].min() and edges[end].max() < high):
            where = partition.folder / f"part{parts[0]}"
            raise fault(where, f"an edge leads elsewhere: {_MEND}.")
    weight, features, labels = map(arrays.get, ("weight", "features", "labels"))
    if labels is not None and labels.max(initial=-1) >= partition.classes:
        why = f"labels reach {labels.max()} but there are {partition.classes} classes: {_MEND}."
        raise fault(partition.folder / f"part{parts[0]}", why)
    masks = {name: arrays[name] for name in MASKS if name in arrays}
    return Part(rank, bounds, edges, weight, features, labels, masks)


def check_ranks(partition: Partition, ranks: int) -> None:
    """Raise ShapeError for more ranks than there are parts."""
    if ranks > partition.parts:
        raise ShapeError(
            f"{partition.folder} has {partition.parts} parts and there are {ranks} ranks: start "
            f"{partition.parts} or fewer, or cut the graph again with --parts {ranks}."
        )


def _joined(partition: Partition, name: str, parts: range) -> Array:
    """Read an array of several parts, the rows of each below those of the last."""
    dtype, tail = np.dtype(partition.dtypes[name]), (partition.width,) * (name == "features")
    sizes = [None if name in EDGES else b - a for a, b in pairwise(partition.bounds)]
    pieces = [load(partition, f"part{p}/{name}.npy", dtype, (sizes[p], *tail)) for p in parts]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def load(
    partition: Partition, name: str, dtype: np.dtype[Any], shape: tuple[int | None, ...]
) -> Array:
    """Read an array of the folder, mapped into memory, and check it; None is for any length."""
    path = partition.folder / name
    check_regular(path)
    if not path.exists():
        raise fault(path, f"it is missing: {_MEND}.")
    size, crc = partition.files[name]
    with naming(path), path.open("rb") as file:
        length, blocks = os.fstat(file.fileno()).st_size, iter(partial(file.read, _BLOCK), b"")
        if length != size or crc != reduce(lambda a, b: zlib.crc32(b, a), blocks, 0):
            raise fault(path, f"it is not the file that {HEADER} describes: {_MEND}.")
        array = mapped(file, _MEND)
    fits = array.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        raise fault(path, f"it has {array.dtype} of shape {array.shape}: {_MEND}.")
    return array


# Sums that tell graphs apart, whatever the order of their edges and the parts they lie in.  They
# find the wrong folder, not a forged one.


def edges_sum(source: Array, target: Array, weight: Array | None) -> int:
    """Sum a 64-bit word for each edge: of its ends, by their first numbers, and its value."""
    words = _random.bits(source, 1)
    words += _random.bits(target, 2)
    if weight is not None:
        words += _random.bits(weight.view(f"u{weight.itemsize}"), 3)
    return int(_random.bits(words, 4).sum(dtype=np.uint64))


def rows_sum(array: Array, dtype: np.dtype[Any]) -> int:
    """Sum a 64-bit word for each row of ``(n, ...)``, of its number and its bytes."""
    n = len(array)
    width = int(np.prod(array.shape[1:]))
    factors = _random.bits(np.arange(width), 5) | np.uint64(1)
    total, step = 0, max(_NUMBERS // max(width, 1), 1)
    for start in range(0, n, step):
        rows = np.ascontiguousarray(array[start : start + step], dtype)
        words = rows.reshape(len(rows), width).view(f"u{dtype.itemsize}").astype(np.uint64)
        words *= factors
        ids = _random.bits(np.arange(start, start + len(rows)), 6)
        ids += words.sum(axis=1, dtype=np.uint64)
        total += int(_random.bits(ids, 7).sum(dtype=np.uint64))
    return total & _random.WORD


def digest(facts: dict[str, Any]) -> str:
    """Return 32 hexadecimal digits for facts that JSON can write."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
