"""Edge lists: one line ``source target [weight]`` per entry, as SNAP and PyG order them.

``source`` is the column and ``target`` the row.  A comment ``# shape: rows x columns`` holds for
the whole file, and one that begins so and states no shape is refused.  The text goes through
NumPy's reader in blocks; a block that it refuses, or that holds a number which cannot be meant, is
looked at line by line.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import FileFormatError, UnsupportedError
from ..formats import checks, foreign
from ..formats.arrays import Array, DType, allocating
from ..formats.base import Format
from ..formats.compressed import COO
from .bounded import fault, reading, stem_and_suffix, writing

_BLOCK = 1 << 16  # 8 MiB of lines and numbers
#: Bytes of blocks without an edge before the file is refused.
_IDLE = 1 << 26
_LINES_WRITTEN = 1 << 16
#: Limit of a text that is read in blocks.
_ANY_SIZE = 1 << 62
#: Ids are read as float64, which holds every integer below this.
_MOST_VERTICES = 2**53
_SEPARATORS = {".csv": ",", ".tsv": "\t", ".txt": "\t", ".edges": " "}
_HEADED = (".csv", ".tsv")
_NAME = re.compile(r"([\"'])?[^\W\d_][\w .:-]*(?(1)\1)")
_EMPTY = re.compile(r"[#%].*\bedges:?\s*0\b.*", re.IGNORECASE)
_SHAPE = re.compile(r"\s*[#%]+\s*shape\s*:(.*)", re.IGNORECASE | re.DOTALL)
_SIZES = re.compile(r"\s*([0-9]{1,19})\s*x\s*([0-9]{1,19})\s*", re.IGNORECASE)


def read_edge_list(
    path: Path, *, dtype: DType, max_bytes: int, num_nodes: int | None = None
) -> Format:
    """Read an edge list as COO, in the order of the lines; unweighted if it has two columns."""
    blocks: list[Array] = []
    total, shape, table = 0, (0, 0), np.empty((0, 2))
    with allocating(f"{path}: its edges"):
        for table, stated in edge_list_blocks(path, max_bytes, num_nodes):
            blocks += [table] if len(table) else []
            shape = stated or shape  # the last one is final
            # Joined, each column is there twice; then there are indices, weights and comparisons.
            total += len(table) * (table.shape[1] * 16 + 40)
            if total > max_bytes:
                raise fault(
                    path,
                    f"the edges take more than max_bytes={max_bytes} bytes: raise max_bytes if you "
                    "trust the file.",
                )
        table = np.concatenate([*blocks, table])  # the last one is empty
        index = foreign.index_dtype(shape, len(table))
        col, row = table[:, 0].astype(index), table[:, 1].astype(index)
    data = None
    if table.shape[1] == 3:
        data = foreign.values("weight", np.ascontiguousarray(table[:, 2]), dtype)
    return COO(row, col, data, shape=shape)


def edge_list_blocks(
    path: Path, max_bytes: int = _ANY_SIZE, num_nodes: int | None = None
) -> Iterator[tuple[Array, tuple[int, int] | None]]:
    """Yield blocks of lines, (lines, 2 or 3) float64, with the shape as far as it is stated.

    There is a block for every 8 MiB, also without edges, and the last one has the final shape.
    """
    lines, most = _Lines(path, num_nodes), np.full((1, 2), -1.0)
    edges = 0
    with reading(path, max_bytes) as stream:
        for text in _blocks(path, stream):
            table = lines.parse(text)
            if len(table):
                most = np.maximum(most, table[:, :2].max(axis=0))
                edges += len(table)
            yield table, lines.shape
    if not edges and not lines.said_empty:
        raise no_edges(path)
    yield np.empty((0, lines.columns or 2)), lines.shape_of(most)


def no_edges(path: Path) -> FileFormatError:
    """Return the error for a file without an edge, which does not say that it has none."""
    return fault(
        path,
        'there is no edge in it: give lines "source target", or, for an empty graph, a line '
        '"# shape: rows x columns".',
    )


def write_edge_list(path: Path, A: Format) -> None:
    """Write the shape as a comment, names of columns (CSV), and a line for each entry."""
    A = A.tocoo().to("cpu")
    largest = max(A.row.max(initial=0), A.col.max(initial=0))
    if largest >= _MOST_VERTICES:
        raise UnsupportedError(
            f"vertex {largest}: an edge list holds ids below 2**53, as float64 does; "
            "write .npz or .mtx instead."
        )
    suffix = stem_and_suffix(path)[0]
    separator = _SEPARATORS[suffix]
    names = ["source", "target"] + (["weight"] if A.data is not None else [])
    with writing(path) as stream:
        stream.write(b"# shape: %d x %d\n" % A.shape)
        if suffix == ".csv":
            stream.write(f"{separator.join(names)}\n".encode())
        for start in range(0, A.nnz, _LINES_WRITTEN):
            part = slice(start, start + _LINES_WRITTEN)
            columns = [A.col[part].tolist(), A.row[part].tolist()]
            if A.data is not None:
                columns.append(A.data[part].astype(np.float64).tolist())
            # repr gives the shortest text that reads back as the same float64.
            rows = (separator.join(map(repr, row)) for row in zip(*columns, strict=True))
            stream.write("".join(f"{row}\n" for row in rows).encode())


def _blocks(path: Path, stream: BinaryIO) -> Iterator[str]:
    """Yield the text in pieces of whole lines; a byte that is no UTF-8 becomes U+FFFD."""
    rest = stream.read(3).removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    while block := stream.read(_BLOCK):
        text, newline, rest = (rest + block).rpartition(b"\n")
        if not newline and len(rest) > _BLOCK:
            raise fault(path, f"a line of more than {_BLOCK} bytes: give one edge a line.")
        yield (text + newline).decode("utf-8", "replace")
    yield rest.decode("utf-8", "replace")


class _Lines:
    """A parser of blocks of lines; what it learns from the first holds for the rest of the file."""

    def __init__(self, path: Path, num_nodes: int | None) -> None:
        self._path = path
        self._first = 1  # number of the block's first line
        self._names_line = 0  # where a header row names the columns
        self._delimiter: str | None = None
        self.columns = 0
        self._num_nodes = num_nodes
        self.shape: tuple[int, int] | None = None if num_nodes is None else (num_nodes, num_nodes)
        self.said_empty = False
        self._idle = 0

    def parse(self, text: str) -> Array:
        """Convert a block of lines to an array, float64 of shape (lines, columns)."""
        if not text.strip():
            self._skip(len(text))
            self._first += text.count("\n")
            return np.empty((0, self.columns or 3))
        lines = text.split("\n")
        if "shape" in text.lower():
            self._find_shape(lines)
        edges = [line for line in lines if line.lstrip()[:1] not in ("", "#", "%")]
        if not self.columns:
            edges = self._begin(lines, edges)
        table = np.empty((0, self.columns or 3))
        if not edges:
            self._skip(len(text))
        else:
            why = "it is no table of numbers"
            try:
                table = np.loadtxt(edges, delimiter=self._delimiter, comments="#", ndmin=2)
                readable = table.shape[1] == self.columns
            except ValueError as error:
                readable, why = False, str(error)
            if not readable or not self._plausible(table):
                self._look_at_each(lines)
                if not readable:
                    raise fault(self._path, f"{why}: give numbers only.", line=self._first)
        self._first += len(lines) - 1
        return table

    def _skip(self, size: int) -> None:
        """Count bytes without an edge; raise where they are too many."""
        self._idle += size
        if self._idle > _IDLE:
            raise fault(
                self._path,
                f"more than {_IDLE} bytes of blank lines and comments: remove them.",
                line=self._first,
            )

    def shape_of(self, table: Array) -> tuple[int, int]:
        """Return the stated shape, else the largest id of all edges plus one."""
        source, target = (int(most) for most in table[:, :2].max(axis=0, initial=-1))
        rows, cols = self.shape or 2 * (max(source, target) + 1,)
        if source >= cols or target >= rows:
            raise fault(
                self._path,
                f"a line behind edges says that the shape is {rows} x {cols}, but the largest "
                f"source is {source} and the largest target {target}: mend the shape or the edges.",
            )
        return rows, cols

    def _find_shape(self, lines: list[str]) -> None:
        """Read the shape from comments that state it; raise for those that fail to."""
        for number, line in enumerate(lines, self._first):
            stated = _SHAPE.fullmatch(line)
            if not stated:
                continue
            self.said_empty = True
            if self._num_nodes is not None:
                continue
            sizes = _SIZES.fullmatch(stated[1])
            shape = (int(sizes[1]), int(sizes[2])) if sizes else (-1, -1)
            if not 0 <= min(shape) <= max(shape) <= checks.MAX_SIZE:
                why = (
                    f"two integers from 0 to {checks.MAX_SIZE} do not follow: write "
                    '"# shape: rows x columns", or begin a comment with another word.'
                )
            elif self.shape not in (None, shape):
                why = f"a line before it says {self.shape[0]} x {self.shape[1]}: remove one."
            else:
                self.shape = shape
                continue
            raise fault(self._path, f"{line.strip()[:80]!r}: {why}", line=number)

    def _begin(self, lines: list[str], edges: list[str]) -> list[str]:
        """Set delimiter and number of columns; return the edges without a row of names."""
        place = lines.index(edges[0]) if edges else len(lines)
        self.said_empty |= any(_EMPTY.fullmatch(line.strip()) for line in lines[:place])
        if not edges:
            return edges
        self._delimiter = "," if "," in edges[0].split("#")[0] else None
        words = self._words(edges[0])
        self.columns = len(words)
        if self.columns not in (2, 3):
            raise fault(
                self._path,
                f"{edges[0].strip()[:80]!r} has {len(words)} columns: give source, target and "
                "perhaps a weight, separated by commas, tabs or blanks.",
                line=self._first + place,
            )
        headed = stem_and_suffix(self._path)[0] in _HEADED
        if headed and all(_NAME.fullmatch(word) and _number(word) is None for word in words):
            self._names_line = self._first + place
            return edges[1:]
        return edges

    def _plausible(self, table: Array) -> bool:
        ends = table[:, :2]
        good = (ends >= 0) & (ends < self._limits()) & (ends == np.floor(ends))
        # An infinity must be one in the text, which only a look at the line can tell.
        return bool(good.all()) and not np.isinf(table[:, 2:]).any()

    def _limits(self) -> tuple[int, int]:
        """Return the bounds that source and target must stay below."""
        rows, cols = self.shape or (_MOST_VERTICES, _MOST_VERTICES)
        return min(cols, _MOST_VERTICES), min(rows, _MOST_VERTICES)

    def _look_at_each(self, lines: list[str]) -> None:
        """Raise for the first line that is malformed; there may be none."""
        for number, line in enumerate(lines, self._first):
            words = self._words(line) if line.lstrip()[:1] not in ("", "#", "%") else []
            if words and number != self._names_line and (why := self._fault_of(words)):
                raise fault(self._path, f"{line.strip()[:80]!r}: {why}", line=number)

    def _fault_of(self, words: list[str]) -> str | None:
        if len(words) != self.columns:
            return f"{len(words)} columns, but the first edge has {self.columns}: give as many."
        for word, name, limit in zip(words, ("source", "target"), self._limits(), strict=False):
            vertex = _number(word)
            if vertex is None or vertex != np.floor(vertex) or not 0 <= vertex < limit:
                mend = "; read larger ones from .npz." if limit == _MOST_VERTICES else "."
                return f"{name} is {word!r}: vertices are integers from 0 to {limit - 1}{mend}"
        weight = _number(words[-1])
        if weight is None:
            return f"weight is {words[-1]!r}: give a decimal number."
        if np.isinf(weight) and "f" not in words[-1].lower():
            return f"weight is {words[-1]}, beyond float64: write inf, or scale the weights."
        return None

    def _words(self, line: str) -> list[str]:
        return [word.strip() for word in line.split("#")[0].split(self._delimiter)]


def _number(word: str) -> float | None:
    """Convert a word to a number as NumPy's reader does, None if it is none."""
    try:
        return None if "_" in word else float(word)
    except ValueError:
        return None
