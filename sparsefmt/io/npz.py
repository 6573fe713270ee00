"""``.npz`` files: this package's versioned layout, SciPy's, and plain CSR arrays.

The layout of this package (version 1) is one member per array of the format, ``shape``, and
``sparsefmt``: a JSON text with ``version``, ``format``, ``values`` (dtype of the values, null if
unweighted), for SGT ``tile``, and ``checksum``, over these and the checksums of the archive's other
members.  NumPy cannot name bfloat16 in a file, so its bits are stored as uint16.  A CSR file is at
the same time a plain one that other programs can read.
"""

import json
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, BinaryIO, Literal

import numpy as np

from ..errors import FileFormatError, UnsupportedError
from ..formats import checks, foreign
from ..formats.arrays import Array, DType, allocating
from ..formats.base import Format
from ..formats.cbsr import CBSR
from ..formats.compressed import COO, CSC, CSR
from ..formats.sgt import SGT
from . import checksums
from .bounded import decoding, fault, unzipped, writing

VERSION = 1
_FORMATS: dict[str, Any] = {kind.format: kind for kind in (COO, CSR, CSC, CBSR, SGT)}
_MOST_MEMBERS = 1000
_LONGEST = 1 << 16  # bytes of a text
_MEND = "copy the file again, or write it with numpy.savez"
#: Casts and checks of small arrays do not count: a fifth of what ``read`` may take above its
#: limit, since checks look at parts of large arrays.
_BUFFERS = 1 << 21
#: Deflate cannot pack tighter than 1032 to 1; a member that claims more is a bomb or lies.
_TIGHTEST = 1032


def array_header(
    path: Path, what: str, stream: IO[bytes], size: int
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a ``.npy`` of ``size`` bytes: shape, whether by columns, and dtype."""
    # NumPy asks for as many bytes as a header claims, which are allocated before they are read.
    head: Any = SimpleNamespace(read=lambda length: stream.read(min(length, size)))
    version = np.lib.format.read_magic(head)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the .npy format")
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(head)
    if dtype.hasobject:
        raise fault(
            path,
            f"{what} holds pickled Python objects, which are never loaded: write it as numbers.",
        )
    declared = prod(shape) * dtype.itemsize
    if not dtype.itemsize or min(shape, default=0) < 0 or dtype.names is not None:
        raise ValueError(f"shape {shape} of {dtype}")
    if stream.tell() + declared != size:
        raise ValueError(
            f"shape {shape} of {dtype} needs {declared} bytes, but {size - stream.tell()} follow"
        )
    return shape, by_columns, dtype


def mapped(file: BinaryIO, mend: str) -> Array:
    """Map the array of an open ``.npy`` into memory, to be read only."""
    path = Path(file.name)
    with decoding(path, "the array is damaged", mend):
        size = file.seek(0, 2)
        file.seek(0)
        shape, by_columns, dtype = array_header(path, "it", file, size)
        order: Literal["F", "C"] = "F" if by_columns else "C"
        return np.memmap(file, dtype, "r", file.tell(), shape, order)


def read_npz(path: Path, *, dtype: DType, max_bytes: int) -> Format:
    """Read a matrix in the format in which the file stores it."""
    with path.open("rb") as file, _Archive(path, file, max_bytes) as archive:
        if "sparsefmt" in archive.members:
            return _read_versioned(archive, dtype)
        if "format" in archive.members:
            return _read_scipy(archive, dtype)
        return _read_compressed(archive, CSR, dtype)


def csr_blocks(
    path: Path, length: int, *, max_bytes: int
) -> Iterator[tuple[tuple[int, int], Array, Array, Array | None]] | None:
    """Return an iterator over a CSR in pieces of at most ``length`` entries, or None.

    It yields shape, rows, columns and values; only ``indptr`` is in memory as a whole.  None where
    the file stores another format.
    """
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        archive = stack.enter_context(_Archive(path, file, max_bytes))
        stored, weighted = "csr", "data" in archive.members
        if "sparsefmt" in archive.members:
            header = _versioned_header(archive)
            stored = "other" if header["values"] == "bfloat16" else header["format"]
            weighted = header["values"] is not None
        elif "format" in archive.members:
            stored, weighted = archive.text("format"), True
        if stored != "csr":
            return None
        return _csr_blocks(archive, length, weighted, stack.pop_all())


def _csr_blocks(
    archive: "_Archive", length: int, weighted: bool, files: ExitStack
) -> Iterator[tuple[tuple[int, int], Array, Array, Array | None]]:
    with files:
        shape = checks.shape(archive.load("shape"))
        indptr = foreign.indices("indptr", archive.load("indptr"))
        nnz = int(indptr[-1]) if indptr.shape == (shape[0] + 1,) else -1
        if nnz < 0 or indptr[0] or (indptr[1:] < indptr[:-1]).any():
            raise archive.fault(f"indptr does not ascend from 0 over {shape[0]} rows: {_MEND}.")
        spare = "format" in archive.members  # SciPy's, whose arrays may be longer
        columns = archive.blocks("indices", length)
        values = archive.blocks("data", length) if weighted else repeat(None)
        done = 0
        for col, value in zip(columns, values, strict=False):
            if spare:
                col, value = col[: nnz - done], None if value is None else value[: nnz - done]
                if not len(col):
                    continue  # to the end, where checksums are compared
            col = foreign.indices("indices", col)
            checks.in_range("indices", col, shape[1], "columns")
            entries = np.arange(done, done + len(col))
            data = None if value is None else foreign.values("data", value)
            if done + len(col) > nnz or (data is not None and len(data) != len(col)):
                raise archive.fault(f"indices and data do not have {nnz} numbers each: {_MEND}.")
            yield shape, np.searchsorted(indptr, entries, side="right") - 1, col, data
            done += len(col)
        if done != nnz or (weighted and not spare and next(values, None) is not None):
            raise archive.fault(f"indices and data do not have {nnz} numbers each: {_MEND}.")


def write_npz(path: Path, A: Format, *, compressed: bool) -> None:
    """Write a matrix in the layout of this package."""
    A = A.to("cpu")
    arrays = A._arrays()
    header: dict[str, Any] = {
        "version": VERSION,
        "format": A.format,
        "values": A.dtype and A.dtype.name,
    }
    if isinstance(A, SGT):
        header["tile"] = A.tile
    if header["values"] == "bfloat16":
        arrays["data"] = arrays["data"].view(np.uint16)
    arrays["shape"] = np.array(A.shape, np.int64)
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED

    def add(name: str, array: Array) -> None:
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)

    with writing(path) as stream, zipfile.ZipFile(stream, "w", method) as archive:
        for name, array in arrays.items():
            add(name, array)
        header[checksums.NAME] = checksums.checksum(header | _sums(archive))
        add("sparsefmt", np.array(json.dumps(header)))


def _sums(archive: zipfile.ZipFile) -> dict[str, list[int]]:
    """Return size and CRC-32 of each array in an archive, with which zipfile compares its bytes."""
    members = {info.filename: [info.file_size, info.CRC] for info in archive.infolist()}
    return {name: sums for name, sums in members.items() if name != "sparsefmt.npy"}


class _Archive:
    """The members of a zip file, each checked before it is allocated."""

    def __init__(self, path: Path, file: BinaryIO, max_bytes: int) -> None:
        self.path, self._left = path, max_bytes
        with decoding(path, "the archive is damaged", "it is no .npz file, or copy it again"):
            self.zip = unzipped(file, _MOST_MEMBERS)
        self._size = file.seek(0, 2)
        names = [info.filename.removesuffix(".npy") for info in self.zip.infolist()]
        if len(set(names)) < len(names):
            raise fault(
                path,
                f"{len(names)} members, {len(set(names))} of different names: each name is there "
                "once; write it again with numpy.savez.",
            )
        self.members = dict(zip(names, self.zip.infolist(), strict=True))
        self._max_bytes = max_bytes

    def __enter__(self) -> "_Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.zip.close()

    def fault(self, why: str) -> FileFormatError:
        """Return the error for a malformed archive; ``why`` ends with the mend."""
        return fault(self.path, why)

    def _info(self, name: str) -> zipfile.ZipInfo:
        """Return what the directory says of a member; raise if there is none."""
        if name not in self.members:
            present = repr(", ".join(self.members))[1:-1] or "none"  # on one line
            raise self.fault(
                f'member "{name}" is missing (there are {present}): '
                "write indptr, indices and shape, or use sparsefmt.write.",
            )
        return self.members[name]

    def load(self, name: str) -> Array:
        """Read the array of that name."""
        info = self._info(name)
        self._check_size(name, info)
        what = f'member "{name}" is damaged'
        with decoding(self.path, what, _MEND), allocating(f"{self.path}: {name}"):
            with self.zip.open(info) as member:
                size, dtype = self._check_array(name, info, member)
                self._check_casts(name, size, dtype)
            with self.zip.open(info) as member:
                return np.lib.format.read_array(member, allow_pickle=False)

    def blocks(self, name: str, length: int) -> Iterator[Array]:
        """Yield a vector in pieces of at most ``length`` numbers, without a limit in total."""
        info = self._info(name)
        self._check_claim(name, info)
        what = f'member "{name}" is damaged'
        with decoding(self.path, what, _MEND), self.zip.open(info) as member:
            size, dtype = self._check_array(name, info, member)
            for start in range(0, size, length):
                piece = member.read(min(length, size - start) * dtype.itemsize)
                yield np.frombuffer(piece, dtype)
            member.read(1)  # the end, where zipfile compares the checksum

    def text(self, name: str) -> str:
        """Read the text of a member with one string or bytes."""
        if self._info(name).file_size > _LONGEST:
            raise self.fault(f'member "{name}" has more than {_LONGEST} bytes: write it again.')
        array = self.load(name)
        if array.shape != () or array.dtype.kind not in "SU":
            raise self.fault(f'member "{name}" is {array.dtype}: it must be one string.')
        value = array.item()
        return value if isinstance(value, str) else value.decode("latin-1")

    def _check_claim(self, name: str, info: zipfile.ZipInfo) -> None:
        """Check that the sizes in the central directory are possible."""
        packed = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _TIGHTEST}.get(info.compress_type, 0)
        is_inside = 0 <= info.header_offset <= self._size - info.compress_size
        if not is_inside or info.file_size > info.compress_size * packed:
            raise self.fault(
                f'member "{name}" claims {info.file_size} bytes out of {info.compress_size}: it is '
                "truncated, a bomb, or packed by other means than deflate; write it with "
                "numpy.savez.",
            )

    def _check_size(self, name: str, info: zipfile.ZipInfo) -> None:
        """Check that a member's sizes are possible and below the limit, and count them."""
        self._check_claim(name, info)
        self._left -= info.file_size
        if self._left < 0:
            raise self.fault(
                f'member "{name}" has {info.file_size} bytes, which takes the matrix beyond '
                f"max_bytes={self._max_bytes}: raise max_bytes if you trust the file.",
            )

    def _check_array(
        self, name: str, info: zipfile.ZipInfo, member: IO[bytes]
    ) -> tuple[int, np.dtype[Any]]:
        """Check an array's header against the size of its member; return its size and dtype."""
        shape, _, dtype = array_header(self.path, f'member "{name}"', member, info.file_size)
        return prod(shape), dtype

    def _check_casts(self, name: str, size: int, dtype: np.dtype[Any]) -> None:
        """Check that there is room for the array's casts and comparisons."""
        if dtype.kind in "biu" and name != "shape":
            self._left -= size * (8 - min(dtype.itemsize, 8)) * (name == "data")
        exact = 28 if dtype.kind in "iu" and dtype.itemsize == 8 and name == "data" else 12
        if self._left + _BUFFERS < size * exact:
            raise self.fault(
                f'member "{name}" has {size} numbers, whose casts and checks take the matrix '
                f"beyond max_bytes={self._max_bytes}: raise max_bytes if you trust the file.",
            )


def _read_versioned(archive: _Archive, dtype: DType) -> Format:
    header = _versioned_header(archive)
    kind = _FORMATS[header["format"]]
    names = [name for name in kind._array_fields if name != "data" or header["values"]]
    extra = archive.members.keys() - {*names, "shape", "sparsefmt"}
    if extra:
        raise archive.fault(
            f"unexpected members {', '.join(sorted(extra))} beside a {kind.__name__}: "
            "leave them out.",
        )
    arrays = {name: archive.load(name) for name in names}
    if header["values"] == "bfloat16":
        arrays["data"] = _bfloat16(archive.path, arrays["data"])
    if "data" in arrays and arrays["data"].dtype.name != header["values"]:
        raise archive.fault(
            f'member "data" is {arrays["data"].dtype} but the header says {header["values"]}: '
            "write the file again.",
        )
    options = {"tile": header.get("tile")} if kind is SGT else {}
    A: Format = kind(**arrays, shape=archive.load("shape"), **options)
    return A if "data" not in arrays else A._replace(data=foreign.values("data", A.data, dtype))


def _versioned_header(archive: _Archive) -> dict[str, Any]:
    try:
        header = json.loads(archive.text("sparsefmt"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise archive.fault('member "sparsefmt" is no JSON: write the file again.') from error
    version = header.get("version") if isinstance(header, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise UnsupportedError(
            f"layout version {version}, and this sparsefmt knows {VERSION}: update sparsefmt."
        )
    known = ("bfloat16", "float16", "float32", "float64", None)
    good = version == VERSION and header.get("values", "") in known
    if not good or header.get("format") not in tuple(_FORMATS):
        raise archive.fault(
            f'member "sparsefmt" is {str(header)[:80]}: it must give version {VERSION}, '
            f"a format among {', '.join(_FORMATS)}, and the dtype of the values.",
        )
    mend = "copy the file again, or write the changed matrix with sparsefmt.write"
    checksums.verify(archive.path, header | _sums(archive.zip), mend)
    return dict(header)


def _bfloat16(path: Path, bits: Array) -> Array:
    if bits.dtype != np.uint16:
        raise fault(path, f'member "data" is {bits.dtype}: bfloat16 is stored as uint16 bits.')
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise UnsupportedError(
            "NumPy has no bfloat16 of its own: pip install ml_dtypes."
        ) from error
    return bits.view(bfloat16)


def _read_scipy(archive: _Archive, dtype: DType) -> Format:
    name = archive.text("format")
    if name in ("csr", "csc"):
        return _read_compressed(archive, CSR if name == "csr" else CSC, dtype, weighted=True)
    if name != "coo":
        raise UnsupportedError(f"SciPy's format {name!r} is not supported: save .tocsr() instead.")
    if "row" in archive.members or "coords" not in archive.members:
        row, col = archive.load("row"), archive.load("col")
    else:
        coords = archive.load("coords")
        if coords.ndim != 2 or len(coords) != 2:
            raise archive.fault(f'member "coords" has shape {coords.shape}: give (2, nnz).')
        row, col = coords
    shape = checks.shape(archive.load("shape"))
    row, col = foreign.indices_alike(shape, row=row, col=col)
    data = foreign.values("data", archive.load("data"), dtype)
    return COO(row, col, data, shape=shape)


def _read_compressed(
    archive: _Archive, kind: type[CSR] | type[CSC], dtype: DType, *, weighted: bool = False
) -> Format:
    shape = checks.shape(archive.load("shape"))
    arrays = {name: archive.load(name) for name in ("indptr", "indices")}
    indptr, indices = foreign.indices_alike(shape, **arrays)
    data = None
    if weighted or "data" in archive.members:
        data = archive.load("data")
        if weighted and (indptr.ndim, indices.ndim, data.ndim) == (1, 1, 1) and len(indptr):
            # SciPy lets both arrays be longer than the entries that indptr counts.
            indices, data = indices[: indptr[-1]], data[: indptr[-1]]
        data = foreign.values("data", data, dtype)
    return kind(indptr, indices, data, shape=shape)
