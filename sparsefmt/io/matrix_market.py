"""Matrix Market files, parsed by ``scipy.io``, with the checks that it leaves out.

SciPy's reader believes the sizes of the header, ignores what follows a number ("1.5" in an integer
file is 1) and crashes on some texts, so one pass first counts and checks what is there.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .._caches import cache
from ..errors import FileFormatError, UnsupportedError
from ..formats import foreign
from ..formats.arrays import Array, DType, allocating
from ..formats.base import Format
from ..formats.compressed import COO
from ..formats.convert import from_dense
from .bounded import fault, reading, writing

_BLOCK = 1 << 17  # 3 MiB of temporaries
_LONGEST_LINE = 1 << 16
_LONGEST_HEADER = 1 << 22  # lines
#: Bytes of the text that belong to no number, and of each number, before it is refused.
_IDLE, _LONGEST_NUMBER = 1 << 26, 1 << 8

#: How to mend what SciPy complains about, by a part of its text.
_MENDS = {
    "banner": 'begin with "%%MatrixMarket matrix coordinate real general".',
    "header element": "use coordinate or array; real, integer or pattern; general, symmetric or "
    "skew-symmetric.",
    "out of bounds": "indices count from 1 to the sizes in the header.",
    "Truncated": "copy the file again, or mend the entry count in the header.",
    "too long": "mend the entry count in the header.",
    "out of range": "integers lie between -2**63 and 2**63 - 1.",
    "negative": "mend the sizes in the header.",
    "dimension line": 'give "rows columns entries" ("rows columns" for an array).',
    "Premature EOF": 'give "rows columns entries" after the comments.',
}


class _Header(NamedTuple):
    rows: int
    cols: int
    entries: int
    format: str
    field: str
    symmetry: str

    @property
    def stored(self) -> int:
        """Return the number of values (array) or entries (coordinate) that the text must hold."""
        if self.format == "coordinate":
            return self.entries
        cells = self.rows * self.cols
        if self.symmetry == "general":
            return cells
        return (cells + (-self.rows if self.symmetry == "skew-symmetric" else self.rows)) // 2

    @property
    def words(self) -> int:
        """Return the number of numbers of one entry."""
        return 1 if self.format == "array" else 2 if self.field == "pattern" else 3

    def peak(self, dtype: DType) -> int:
        """Return the most bytes that reading takes: SciPy's arrays, mirrored, checked and cast."""
        cast = 4  # comparisons
        if self.field in ("integer", "unsigned-integer"):
            cast += 28
        elif dtype is not None:
            cast += 2 * np.dtype(dtype).itemsize
        if self.format == "array":
            return self.rows * self.cols * (16 + cast)  # and _CELL for each nonzero
        index = 8 if max(self.rows, self.cols) > np.iinfo(np.int32).max else 4
        entry = 2 * index + 8
        if self.symmetry == "general":
            return self.entries * (entry + cast)
        return self.entries * max(3 * entry + 10, 2 * (entry + cast))


#: Bytes that each nonzero cell of an array takes while it becomes an entry.
_CELL = 64


@dataclass
class _Body:
    """Counts and the first fault of the text after the header."""

    size: int = 0  #: bytes
    last_line: int = 0  #: its number in the file
    words: int = 0  #: numbers
    infinities: int = 0  #: numbers that say "inf"
    fault: tuple[int, str] | None = None  #: first line that is malformed


def read_matrix_market(path: Path, *, dtype: DType, max_bytes: int) -> Format:
    """Read a matrix as COO: entries in the order of the file, then the mirrored ones."""
    sums: list[int] = []  # another process may change the file between the passes
    header = _read_header(path, max_bytes, sums)
    _check_header(path, header, header.peak(dtype), max_bytes)
    body = _scan(path, header, max_bytes, sums)
    if body.size + 1 < header.stored * 2 * header.words:  # a digit and a blank for each number
        raise fault(
            path,
            f"the file ends after {body.size} bytes of the {header.stored} entries that its "
            "header promises: copy the file again, or mend the entry count.",
            line=body.last_line,
        )
    if body.fault:
        raise fault(path, body.fault[1], line=body.fault[0])
    # With no rows, SciPy's array reader divides by zero and takes the process down.
    if header.format == "array" and 0 in (header.rows, header.cols):
        matrix: Any = np.zeros((header.rows, header.cols))
    else:
        with _scipy_errors(path), allocating(f"{path}: {header.peak(dtype)} bytes"):
            import scipy.io

            # It reads beyond its buffer if something follows the last number of an open line.
            with reading(path, max_bytes, tail=b"\n", sums=sums) as stream:
                matrix = scipy.io.mmread(stream, spmatrix=False)
    if body.words != header.stored * header.words:
        raise fault(
            path,
            f"the header promises {header.stored * header.words} numbers but {body.words} follow: "
            "give each entry a line of its own and nothing else on it.",
        )
    if header.format == "coordinate" and header.symmetry == "skew-symmetric":
        _check_diagonal(
            path, matrix.row[: header.entries] == matrix.col[: header.entries], max_bytes
        )
    if header.format == "coordinate":
        stored = matrix.data[: header.entries]  # without the mirrored ones
    else:
        stored = matrix if header.symmetry == "general" else np.tril(matrix)
    _check_values(path, header, body, stored, max_bytes)
    if header.format == "array":
        _check_peak(
            path, header, int(np.count_nonzero(matrix)) * _CELL + header.peak(dtype), max_bytes
        )
    return _as_coo(matrix, header, dtype)


def write_matrix_market(path: Path, A: Format) -> None:
    """Write a coordinate file, "real" or "pattern", "general"; values in full, as float64."""
    import scipy.io
    import scipy.sparse

    A = A.tocoo().to("cpu")
    data = np.ones(A.nnz) if A.data is None else A.data.astype(np.float64)
    matrix = scipy.sparse.coo_array((data, (A.row, A.col)), shape=A.shape)
    field = "pattern" if A.data is None else "real"
    with writing(path) as stream:
        if not A.nnz:  # SciPy would call an empty pattern "real"
            sizes = f"{A.n_rows} {A.n_cols} 0"
            stream.write(f"%%MatrixMarket matrix coordinate {field} general\n{sizes}\n".encode())
            return
        scipy.io.mmwrite(stream, matrix, field=field, symmetry="general")


def _read_header(path: Path, max_bytes: int, sums: list[int]) -> _Header:
    """Read banner and sizes, the only lines that SciPy sees: it knows no longest line."""
    import scipy.io

    banner, sizes, line = b"", b"", 0
    with reading(path, max_bytes, sums=sums) as stream:
        for text in _header_lines(path, stream):
            banner, sizes, line = banner or text, text, line + 1
    if not sizes.strip() or sizes.lstrip().startswith(b"%"):  # the file ends before them
        sizes, line = b"", line + 1
    with _scipy_errors(path, line):
        return _Header(*scipy.io.mminfo(BytesIO(banner + b"\n" + sizes)))


def _check_header(path: Path, header: _Header, peak: int, max_bytes: int) -> None:
    """Raise for a matrix that is not real, or larger than allowed, before any allocation."""
    if header.field == "complex":
        raise UnsupportedError(
            f"a {header.field} {header.symmetry} matrix, and complex values are not "
            "supported: write its real part or its modulus."
        )
    if header.symmetry != "general" and header.rows != header.cols:
        raise fault(
            path,
            f"a {header.symmetry} matrix cannot be {header.rows} x {header.cols}: "
            'make it square, or "general".',
        )
    unsigned = header.field in ("pattern", "unsigned-integer")
    if header.symmetry == "skew-symmetric" and unsigned:
        raise fault(path, f'a {header.field} matrix cannot be skew-symmetric: use "real".')
    _check_peak(path, header, peak, max_bytes)


def _check_peak(path: Path, header: _Header, peak: int, max_bytes: int) -> None:
    if peak > max_bytes:
        raise fault(
            path,
            f"the header promises a {header.rows} x {header.cols} {header.format} matrix that "
            f"takes {peak} bytes to read, more than max_bytes={max_bytes}: raise max_bytes if you "
            "trust the file.",
        )


@contextmanager
def _scipy_errors(path: Path, sizes_line: int | None = None) -> Iterator[None]:
    """Convert SciPy's errors to ``FileFormatError`` with the line that they name.

    If SciPy got only the header, what is not wrong with line 1 is wrong with that of the sizes.
    """
    try:
        yield
    except FileFormatError:
        raise
    except (ValueError, OverflowError, IndexError, RuntimeError) as error:
        match = re.fullmatch(r"(?:Line (\d+): )?(.*?)\.?", str(error), re.DOTALL)
        line, text = match.groups() if match else (None, str(error))
        line = line if line == "1" or sizes_line is None else sizes_line
        mend = next((mend for part, mend in _MENDS.items() if part in text), "give numbers only.")
        raise fault(path, f"{text}: {mend}", line=int(line) if line else None) from error


# Checks of the text


def _scan(path: Path, header: _Header, max_bytes: int, sums: list[int]) -> _Body:
    """Count and check the numbers of the body, block by block."""
    body = _Body()
    with reading(path, max_bytes, sums=sums) as stream:
        line = 1 + sum(1 for _ in _header_lines(path, stream))
        rest = b""
        while block := stream.read(_BLOCK):
            text, newline, rest = (rest + block).rpartition(b"\n")
            if not newline and len(rest) > _LONGEST_LINE:
                raise fault(path, "a line of more than 65536 bytes: give one entry a line.")
            line = _scan_block(body, text + newline, line, header)
            if body.size > _IDLE + _LONGEST_NUMBER * header.stored * header.words:
                raise fault(
                    path,
                    f"{body.size} bytes follow the header of {header.stored} entries: mend the "
                    "entry count, or remove the blanks.",
                    line=line,
                )
        body.last_line = _scan_block(body, rest, line, header) - (not rest)
    return body


def _header_lines(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the banner, comments and the line of sizes; leave the stream behind them."""
    banner = True
    for number in count(1):
        line = stream.readline(_LONGEST_LINE)
        if not line:
            return
        if number > _LONGEST_HEADER:
            raise fault(path, f"{_LONGEST_HEADER} lines of header: remove comments and blanks.")
        if len(line) == _LONGEST_LINE:
            raise fault(path, "a line of more than 65536 bytes: shorten it.")
        yield line
        if banner and line.lower().split()[1:2] == [b"vector"]:
            raise fault(path, "a vector file: write it as a matrix with one column.", line=1)
        if not banner and line.strip() and not line.lstrip().startswith(b"%"):
            return
        banner = False


# Classes of characters: anything else is 0 and never allowed.
_BLANK, _DIGIT, _SIGN, _DOT, _EXPONENT = range(1, 6)
_WORDS = re.compile(rb"(?<=[\s+-])(?:nan|inf|infinity)(?=\s)", re.IGNORECASE)


@cache
def _classes(field: str) -> Array:
    table = np.zeros(256, np.uint8)
    words = {_BLANK: b" \t\r\n", _DIGIT: b"0123456789", _SIGN: b"+-"}
    if field not in ("integer", "unsigned-integer", "pattern"):
        words |= {_DOT: b".", _EXPONENT: b"eE"}
    for kind, characters in words.items():
        table[list(characters)] = kind
    return table


@cache
def _followers() -> tuple[Array, Array]:
    """Build tables of which class may follow which, at ``8 * left + right``."""
    # In a text, and in its skeleton, without digits.
    text, skeleton = np.zeros((8, 8), bool), np.zeros((8, 8), bool)
    text[_BLANK, [_BLANK, _DIGIT, _SIGN, _DOT]] = True
    text[_DIGIT, [_BLANK, _DIGIT, _DOT, _EXPONENT]] = True
    text[_SIGN, [_DIGIT, _DOT]] = True
    text[_DOT, [_BLANK, _DIGIT, _EXPONENT]] = True
    text[_EXPONENT, [_DIGIT, _SIGN]] = True
    skeleton[_BLANK] = skeleton[:, _BLANK] = True
    skeleton[_SIGN, [_DOT, _EXPONENT]] = skeleton[_EXPONENT, _SIGN] = True
    skeleton[_DOT, _EXPONENT] = True
    return text.ravel(), skeleton.ravel()


def _scan_block(body: _Body, block: bytes, line: int, header: _Header) -> int:
    """Add a block of whole lines to ``body``; return the number of the line after it."""
    text = b"\n" + block + b"\n"
    if b"n" in text or b"N" in text:
        words = _WORDS.findall(text)
        body.infinities += sum(word[:1] in b"iI" for word in words)
        text = _WORDS.sub(lambda word: b"0" * len(word[0]), text)
    kinds = _classes(header.field)[np.frombuffer(text, np.uint8)]
    blank = kinds == _BLANK
    body.size += len(block)
    body.words += int(np.count_nonzero(blank[:-1] & ~blank[1:]))
    in_text, in_skeleton = _followers()
    places = np.flatnonzero(kinds != _DIGIT)
    bones = kinds[places]
    faults = [
        *(np.flatnonzero(~in_text[kinds[:-1] * 8 + kinds[1:]])[:1] + 1),
        *places[np.flatnonzero(~in_skeleton[bones[:-1] * 8 + bones[1:]])[:1] + 1],
    ]
    if faults and body.fault is None:
        first = int(min(faults)) - 1
        begin = block.rfind(b"\n", 0, first) + 1
        bad = block[begin : begin + 80].split(b"\n")[0].decode("latin-1").strip()
        number = line + block.count(b"\n", 0, first)
        what = f"{bad!r} is not an entry of {header.words} numbers of field {header.field}"
        body.fault = number, f"{what}: mend the line, or the field in the banner."
    return line + block.count(b"\n")


# Checks and casts of the values


def _check_diagonal(path: Path, diagonal: Array, max_bytes: int) -> None:
    if not diagonal.any():
        return
    with reading(path, max_bytes) as stream:
        first = 1 + sum(1 for _ in _header_lines(path, stream))
        entries = (line for line, text in enumerate(stream, first) if text.strip())
        line = next(islice(entries, int(diagonal.argmax()), None))
    raise fault(
        path,
        "an entry on the diagonal, where a skew-symmetric matrix is zero and stores none: "
        'remove the line, or use "general".',
        line=line,
    )


def _check_values(path: Path, header: _Header, body: _Body, data: Array, max_bytes: int) -> None:
    if header.field == "integer" and header.symmetry == "skew-symmetric":
        if (data == np.iinfo(np.int64).min).any():
            raise fault(path, 'the negative of -2**63 is no int64: write field "real".')
    elif np.count_nonzero(np.isinf(data)) > body.infinities:
        raise _overflow(path, max_bytes)


def _overflow(path: Path, max_bytes: int) -> FileFormatError:
    """Return the error for the first finite number that became infinite."""
    mend = "is beyond float64: write inf, or scale the values."
    with reading(path, max_bytes) as stream:
        for line, text in enumerate(stream, 1):
            word = b"" if b"%" in text else b"".join(text.split()[-1:])
            if word[-1:].isdigit() and np.isinf(float(word)):
                return fault(path, f"{word.decode()} {mend}", line=line)
    return fault(path, f"a number {mend}")


def _as_coo(matrix: Any, header: _Header, dtype: DType) -> Format:
    if header.format == "array":
        # Integers are checked for exactness before zeros are told from values.
        dense = foreign.values("the array", matrix, dtype)
        index = foreign.index_dtype(dense.shape, dense.size)
        A: COO = from_dense(dense, "coo", index_dtype=index)
        return A
    shape = header.rows, header.cols
    index = foreign.index_dtype(shape, matrix.nnz)
    row, col = (foreign.indices("index", axis, index) for axis in matrix.coords)
    data = None if header.field == "pattern" else foreign.values("value", matrix.data, dtype)
    return COO(row, col, data, shape=shape)
