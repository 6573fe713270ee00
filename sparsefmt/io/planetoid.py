"""Raw Planetoid data sets: ``ind.<name>.graph``, ``.x``, ``.tx``, ... (Yang et al. 2016).

The files are pickles, and a pickle can name any function of any module to be called.  Here no name
is ever looked up: each becomes an inert record of its arguments, and only records that describe
plain numeric arrays, SciPy's CSR matrices or dictionaries of lists are turned into such.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import checks, foreign
from ..formats.arrays import Array, allocating
from ..formats.compressed import COO, CSR
from . import pickles
from .bounded import decoding, fault, naming
from .pickles import Record, Table

#: The names that such pickles hold, in Python 2 and 3 and in all versions of NumPy and SciPy.
_KNOWN = {
    "array": r"numpy\.(_?core)\.multiarray\._reconstruct|numpy\.ndarray",
    "dtype": r"numpy\.dtype",
    "buffer": r"numpy\.(_?core)\.numeric\._frombuffer",
    "scalar": r"numpy\.(_?core)\.multiarray\.scalar",
    "csr": r"scipy\.sparse\.(_?csr\.)?csr_(matrix|array)",
    "encode": r"_codecs\.encode",
    "new": r"copy_?reg\.(_reconstructor|__newobj__)",
    "object": r"(__builtin__|builtins)\.(object|list|int|bytes|bytearray)",
    "mapping": r"collections\.(defaultdict|OrderedDict)",
}
_DTYPE = re.compile(r"[<>|=]?([biu][1248]|f[248]|b1)")
_VALIDATION = 500
#: Bytes of memory for one in a pickle, at most: an empty dictionary, or a name's class.
_LARGEST_OBJECT = 80
_MOST_AXES = 32


@dataclass(frozen=True)
class Planetoid:
    """A citation graph with features, labels and the public split (Yang et al. 2016)."""

    graph: CSR  #: (n, n) unweighted; symmetric, no duplicates, no self-loops
    x: CSR | Array  #: (n, feat) features, CSR or dense as in the files; not normalised
    y: Array  #: (n,) int64 classes, -1 for a vertex without label
    train_mask: Array  #: (n,) bool
    val_mask: Array  #: (n,) bool, the 500 vertices after the training set
    test_mask: Array  #: (n,) bool


def read_graph(path: Path, *, max_bytes: int) -> CSR:
    """Read ``ind.<name>.graph`` as CSR, symmetrised, without duplicates and self-loops."""
    path = _find(path)
    with _decoding(path):
        row, col = _adjacency(path, max_bytes)
        return _symmetric(row, col, int(max(row.max(initial=-1), col.max(initial=-1))) + 1)


def read_all(path: Path, *, max_bytes: int) -> Planetoid:
    """Read graph, features, labels and masks: see ``sparsefmt.io.read_planetoid``."""
    path = _find(path)
    parts = {
        name: _part(path.with_suffix(f".{name}"), max_bytes)
        for name in ("x", "allx", "tx", "y", "ally", "ty")
    }
    test = _test_index(path.with_suffix(".test.index"), max_bytes)
    for name in ("y", "ally", "ty"):
        if isinstance(parts[name], CSR):
            why = "labels are a CSR matrix, but a dense one of classes is read: write .toarray()."
            raise fault(path.with_suffix(f".{name}"), why)
    n_train, n_all = len(parts["y"]), len(parts["ally"])
    _check_sizes(path, {name: part.shape for name, part in parts.items()}, test)
    with _decoding(path):
        row, col = _adjacency(path, max_bytes)
        n = int(max(n_all - 1, *(ids.max(initial=-1) for ids in (row, col, test)))) + 1
        width = parts["allx"].shape[1] if isinstance(parts["allx"], np.ndarray) else 1
        _check_room(path, f"{n} vertices", n * max(width, 1) * 24, max_bytes)
        places = np.concatenate([np.arange(n_all), test])
        y = np.full(n, -1)
        y[places] = np.concatenate([_classes(parts["ally"]), _classes(parts["ty"])])
        masks = np.zeros((3, n), bool)
        masks[0, :n_train] = True
        masks[1, n_train : min(n_train + _VALIDATION, n_all)] = True
        masks[2, test] = True
        x = _features(parts["allx"], parts["tx"], places, n)
        return Planetoid(_symmetric(row, col, n), x, y, *masks)


def _find(path: Path) -> Path:
    """Return the ``ind.<name>.graph`` of a path: itself, or the only one of a folder."""
    if not path.is_dir():
        return path
    paths = sorted(path.glob("ind.*.graph"))
    if len(paths) != 1:
        names = ", ".join(graph.name for graph in paths) or "no ind.<name>.graph"
        raise fault(path, f"the folder holds {names}: give the path of one such file.")
    return paths[0]


# What the parts mean


def _part(path: Path, max_bytes: int) -> Any:
    with _decoding(path):
        part = _load(path, max_bytes)
        is_csr = isinstance(part, Record) and part.kind in ("csr", "new")
        matrix = _csr(part) if is_csr else _array(part)
        if len(matrix.shape) != 2:
            raise ValueError(f"an array of shape {matrix.shape}")
        return matrix if isinstance(matrix, CSR) else foreign.values(path.name, matrix)


def _check_sizes(path: Path, shapes: dict[str, tuple[int, int]], test: Array) -> None:
    rows = {name: shape[0] for name, shape in shapes.items()}
    widths = {shapes[name][1] for name in ("x", "allx", "tx")}
    classes = {shapes[name][1] for name in ("y", "ally", "ty")}
    agree = rows["x"] == rows["y"] and rows["allx"] == rows["ally"]
    agree &= rows["tx"] == rows["ty"] == len(test) and rows["x"] <= rows["allx"]
    if not agree or len(widths) > 1 or len(classes) > 1:
        raise fault(
            path,
            f"the parts do not fit together ({shapes}, {len(test)} test vertices): take all files "
            "from one data set.",
        )
    if len(np.unique(test)) < len(test) or test.min(initial=rows["allx"]) < rows["allx"]:
        raise fault(
            path.with_suffix(".test.index"),
            f"test vertices are distinct and at least {rows['allx']}, the rows of allx: "
            "take all files from one data set.",
        )


def _test_index(path: Path, max_bytes: int) -> Array:
    size = path.stat().st_size
    _check_room(path, f"{size} bytes of numbers", size * _LARGEST_OBJECT, max_bytes)
    words = path.read_text("latin-1").split("\n")
    index = []
    for line, word in enumerate(map(str.strip, words), 1):
        if word:
            if not re.fullmatch(r"\d{1,15}", word):
                raise fault(path, f"{word[:80]!r} is no vertex: give one a line.", line=line)
            index.append(int(word))
    return np.array(index, np.int64)


def _classes(one_hot: Array) -> Array:
    if not one_hot.shape[1]:
        return np.full(len(one_hot), -1)
    return np.where(one_hot.any(axis=1), one_hot.argmax(axis=1), -1)


def _features(allx: Any, tx: Any, places: Array, n: int) -> CSR | Array:
    """Join the rows of ``allx`` and ``tx`` at their places among ``n``; other rows are empty."""
    if isinstance(allx, CSR) != isinstance(tx, CSR):
        raise TypeError("allx and tx are not both sparse or both dense")
    if not isinstance(allx, CSR):
        x = np.zeros((n, allx.shape[1]), np.result_type(allx, tx))
        x[places] = np.concatenate([allx, tx])
        return x
    top, bottom = allx.tocoo(), tx.tocoo()
    row = places[np.concatenate([top.row, bottom.row + np.int64(allx.n_rows)])]
    col = np.concatenate([top.col, bottom.col]).astype(np.int64)
    data = np.concatenate([top.data, bottom.data])
    return _narrow(COO(row, col, data, shape=(n, allx.n_cols))).tocsr()


def _adjacency(path: Path, max_bytes: int) -> tuple[Array, Array]:
    """Read key and neighbour of each entry of the dictionary."""
    neighbours = _load(path, max_bytes)
    if not isinstance(neighbours, dict):
        raise TypeError(f"a {type(neighbours).__name__} instead of a dictionary")
    keys = [_integer(key) for key in neighbours]
    lists = list(neighbours.values())
    if not all(isinstance(vertices, list) for vertices in lists):
        raise TypeError("neighbours that are no list")
    lengths = [len(vertices) for vertices in lists]
    # One list may stand behind many keys, so little text can mean many edges.
    _check_room(path, f"{sum(lengths)} edges", sum(lengths) * 64, max_bytes)
    col = np.array([_integer(vertex) for vertices in lists for vertex in vertices], np.int64)
    ids = np.array(keys, np.int64)
    least = min(ids.min(initial=0), col.min(initial=0))
    most = max(ids.max(initial=0), col.max(initial=0))
    _check_room(path, f"vertices from {least} to {most}", int(most) * 16, max_bytes)
    if least < 0 or most > np.iinfo(np.int32).max:  # the square of their number is below 2**63
        raise ValueError(f"vertices from {least} to {most}")
    return np.repeat(ids, lengths), col


def _check_room(path: Path, what: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise fault(
            path,
            f"{what} do not fit in max_bytes={max_bytes}, they take {size} bytes: raise max_bytes "
            "if you trust the file.",
        )


def _symmetric(row: Array, col: Array, n: int) -> CSR:
    no_loop = row != col
    row, col = row[no_loop], col[no_loop]
    edges = np.unique(np.concatenate([row * n + col, col * n + row]))
    A = COO(*np.divmod(edges, max(n, 1)), shape=(n, n))
    return _narrow(A).tocsr()


def _narrow(A: COO) -> COO:
    return A.astype(index_dtype=foreign.index_dtype(A.shape, A.nnz))


def _load(path: Path, max_bytes: int) -> Any:
    size = path.stat().st_size
    if size * _LARGEST_OBJECT > max_bytes:
        raise fault(
            path,
            f"{size} bytes of pickle, of which each can take {_LARGEST_OBJECT}, are more than "
            f"max_bytes={max_bytes}: raise max_bytes if you trust the file.",
        )
    with allocating(f"{path}: {size} bytes"):
        return pickles.load(path.read_bytes(), _KNOWN, "Planetoid file")


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    why = "not a Planetoid pickle, nothing of it was run"
    with naming(path), decoding(path, why, "copy the file again"):
        yield


# Records into arrays


def _record(thing: object, *kinds: str) -> Any:
    if not isinstance(thing, Record) or thing.kind not in kinds:
        name = "dict" if type(thing) is Table else type(thing).__name__
        raise TypeError(f"a {name} instead of {' or '.join(kinds)}")
    return thing


def _raw(thing: Any) -> bytes:
    if isinstance(thing, Record):
        if thing.kind == "object" and not thing.args:  # bytes(), where there are none
            return b""
        thing, _ = _record(thing, "encode").args
    return thing.encode("latin-1") if isinstance(thing, str) else bytes(memoryview(thing))


def _dtype(thing: object) -> np.dtype[Any]:
    record = _record(thing, "dtype")
    code = record.args[0]
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise TypeError(f"values of dtype {_described(code)}")
    dtype = np.dtype(code)
    return dtype.newbyteorder(">") if record.state and record.state[1] == ">" else dtype


def _described(thing: object) -> str:
    """Describe a part in an error: a text by itself, all else by its type, since it may not end."""
    return repr(thing)[:80] if isinstance(thing, str) else f"a {type(thing).__name__}"


def _check_shape(shape: object) -> None:
    """Raise for a shape that is none, or whose sizes or their number do not end."""
    if not isinstance(shape, tuple | list) or len(shape) > _MOST_AXES:
        raise TypeError(f"{_described(shape)} as a shape")
    if not all(isinstance(size, int) and 0 <= size < 1 << 63 for size in shape):
        raise ValueError("a shape with other sizes than integers from 0")


def _array(thing: object) -> Array:
    record = _record(thing, "array", "buffer")
    if record.kind == "buffer":
        raw, dtype, shape, order = record.args
    else:
        _, shape, dtype, by_columns, raw = record.state
        order = "F" if by_columns else "C"
    _check_shape(shape)
    values = _dtype(dtype)
    flat = np.frombuffer(_raw(raw), values)
    if len(flat) != prod(shape):
        raise ValueError(f"{len(flat)} values for an array of shape {shape}")
    return flat.reshape(shape, order=order)


def _integer(thing: object) -> int:
    if isinstance(thing, Record):
        dtype, raw = _record(thing, "scalar").args
        text = raw.args[0] if isinstance(raw, Record) and raw.args else raw
        if isinstance(text, str | bytes | bytearray) and len(text) > 8:  # which many could share
            raise ValueError(f"a number of {len(text)} bytes")
        thing = np.frombuffer(_raw(raw), _dtype(dtype))[0].item()
    if not isinstance(thing, int):
        raise TypeError(f"a {type(thing).__name__} instead of a vertex")
    return thing


def _csr(thing: Any) -> CSR:
    if thing.kind == "new" and getattr(thing.args[0], "kind", "") != "csr":
        raise TypeError("an object instead of a csr_matrix")
    state = thing.state[0] if isinstance(thing.state, tuple) else thing.state
    shape = state["_shape"] if "_shape" in state else state["shape"]
    _check_shape(() if shape is None else shape)
    shape = checks.shape(shape)
    pointers = {name: _array(state[name]) for name in ("indptr", "indices")}
    indptr, indices = foreign.indices_alike(shape, **pointers)
    data = foreign.values("data", _array(state["data"]))
    return CSR(indptr, indices, data, shape=shape)
