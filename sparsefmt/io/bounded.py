"""Streams of graph files: bounded decompression, atomic writes, errors that name file and line."""

import bz2
import errno
import gzip
import io
import os
import pickle
import secrets
import stat
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha1
from pathlib import Path
from struct import error as StructError
from typing import Any, BinaryIO, cast

from ..errors import FileFormatError, OutOfMemoryError, SparseFmtError, UnsupportedError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_CHUNK = 1 << 20
_BLOCK = 1 << 16
_COMPRESSED = (".gz", ".bz2")
#: Compressed members of a file, beside one for each KiB of text: an empty one takes time too.
_MOST_MEMBERS = 1000
#: Bytes for a member in the directory of a zip archive, at most: its name, and what others add.
_ENTRY = 512
#: What zipfile, numpy.lib.format, pickle and torch raise on bytes that are none of theirs.
BROKEN = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    StructError,
    tokenize.TokenError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def fault(path: Path, why: str, *, line: int | None = None) -> FileFormatError:
    """Return the error for a malformed file; ``why`` ends with the mend."""
    place = f"{path}, line {line}" if line else f"{path}"
    return FileFormatError(f"{place}: {why}")


def stem_and_suffix(path: Path) -> tuple[str, str]:
    """Return the lower-case suffix without ``.gz`` or ``.bz2``, and that: ``(".mtx", ".gz")``."""
    packed = path.suffix.lower()
    if packed in _COMPRESSED:
        return path.with_suffix("").suffix.lower(), packed
    return packed, ""


def named(path: str | os.PathLike[str]) -> Path:
    """Convert an argument to a path; raise for "", which ``Path`` takes for "."."""
    if not os.fspath(path):
        raise FileFormatError("path is '', which no file can have: give the name of a file.")
    return Path(path)


def check_regular(path: Path) -> None:
    """Raise for devices, pipes and sockets, which may block or never end, and impossible names.

    Missing files and folders pass: whoever opens them gets the operating system's error.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except ValueError as error:  # a NUL, or what the file system cannot encode
        raise FileFormatError(
            f"path is {str(path)!r}, which no file can have ({error}): give another name."
        ) from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UnsupportedError(
            f"{path}: it is a device, pipe or socket, and only regular files are read or written: "
            "give the path of one."
        )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to errors raised inside the context."""
    try:
        yield
    except (FileFormatError, OutOfMemoryError):
        raise
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error
    except SparseFmtError as error:
        raise fault(path, str(error)) from error
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        if error.errno == errno.EINVAL:  # a place that is none, before the file begins
            raise fault(path, f"its sizes are damaged ({error}): copy the file again.") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def decoding(path: Path, what: str, mend: str) -> Iterator[None]:
    """Convert what zipfile, NumPy, pickle and torch raise on damaged bytes, as ``what``."""
    try:
        # NumPy warns about headers of Python 2, and Python about escapes of old pickles.
        with warnings.catch_warnings(action="ignore", category=Warning):
            yield
    except SparseFmtError:
        raise
    except BROKEN as error:
        text = str(error).split("\n")[0].rstrip(".")[:200] or type(error).__name__
        raise fault(path, f"{what} ({text}): {mend}.") from error


def unzipped(file: BinaryIO, most: int) -> zipfile.ZipFile:
    """Open a zip archive of at most ``most`` members; raise what ``decoding`` converts.

    A member that the directory loses, or names otherwise than its own header, is damage, although
    a reader of the other members would not notice it.
    """
    zips: Any = zipfile
    end = zips._EndRecData(file)
    if not end:
        raise ValueError("not a zip archive")
    if end[zips._ECD_SIZE] > most * _ENTRY:
        raise ValueError(f"a directory of {end[zips._ECD_SIZE]} bytes")
    archive = zipfile.ZipFile(file)
    infos = archive.infolist()
    if len(infos) > most or end[zips._ECD_ENTRIES_TOTAL] != len(infos):
        raise ValueError(
            f"{len(infos)} members of {end[zips._ECD_ENTRIES_TOTAL]}, at most {most} are read"
        )
    for info in infos:
        archive.open(info).close()  # raises where the two headers of a member differ
    return archive


def _unpacked(raw: BinaryIO, path: Path, packed: str) -> Iterator[bytes]:
    """Yield the text of compressed members, one behind another; other bytes are refused."""
    members, size, rest = 0, 0, raw.read(_BLOCK)
    zeros = b"\0" * (packed == ".gz")  # which tapes add
    while rest or not members:
        member: Any = zlib.decompressobj(31) if packed == ".gz" else bz2.BZ2Decompressor()
        while not member.eof:
            text = member.decompress(rest, _CHUNK)
            yield text
            rest, size = getattr(member, "unconsumed_tail", b""), size + len(text)
            if not rest and getattr(member, "needs_input", True) and not member.eof:
                rest = raw.read(_BLOCK)
                if not rest and not text:
                    raise EOFError("it ends early")
        members += 1
        if members > _MOST_MEMBERS + size // 1024:
            raise fault(
                path,
                f"{members} compressed pieces hold {size} bytes: unpack it, and pack it in one.",
            )
        rest = member.unused_data
        while not (rest := rest.lstrip(zeros)) and (rest := raw.read(_BLOCK)):
            pass


class _Bounded(io.RawIOBase):
    """A stream that raises ``FileFormatError`` where it is damaged or passes ``limit`` bytes.

    ``sums`` has the CRC-32 of blocks that were read before, which must be the same now.
    """

    def __init__(
        self, blocks: Iterator[bytes], path: Path, limit: int, tail: bytes, sums: list[int] | None
    ) -> None:
        self._blocks, self._path, self._limit = blocks, path, limit
        self._tail, self._sums = tail, sums
        self._done, self._number, self._block = 0, 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._block:
            self._block = self._next()
        size = min(len(buffer), len(self._block))
        memoryview(buffer)[:size] = self._block[:size]
        self._block = self._block[size:]
        return size

    def _next(self) -> bytes:
        """Return the next block, b"" at the end."""
        try:
            block = next(filter(None, self._blocks), b"")
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise fault(
                self._path, f"the compressed data is damaged ({error}): copy the file again."
            ) from error
        self._done += len(block)
        if self._done > self._limit:
            raise fault(
                self._path,
                f"the text has more than max_bytes={self._limit} bytes: "
                "raise max_bytes if you trust the file.",
            )
        if self._sums is not None:
            crc = zlib.crc32(block)
            self._sums += [crc] * (self._number == len(self._sums))
            if self._sums[self._number] != crc:
                raise fault(self._path, "it changed while it was read: read it again.")
            self._number += bool(block)  # the end may come again
        if not block:
            block, self._tail = self._tail, b""
        return block


@contextmanager
def reading(
    path: Path, max_bytes: int, *, tail: bytes = b"", sums: list[int] | None = None
) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a text file, at most ``max_bytes``, and then ``tail``.

    A text that is opened again with the same list ``sums`` is refused where it has changed.
    """
    packed = stem_and_suffix(path)[1]
    with path.open("rb") as raw:
        blocks = _unpacked(raw, path, packed) if packed else iter(partial(raw.read, _CHUNK), b"")
        with io.BufferedReader(_Bounded(blocks, path, max_bytes, tail, sums), _CHUNK) as stream:
            yield stream


class _Sink(io.RawIOBase):
    """A stream without positions: SciPy asks for some that a BZ2File then refuses."""

    def __init__(self, inner: BinaryIO) -> None:
        self._inner = inner

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        return self._inner.write(block)


def _packer(raw: BinaryIO, packed: str) -> BinaryIO:
    if packed == ".gz":
        # No name and no time: the same matrix gives the same bytes.
        gz = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
        return cast(BinaryIO, gz)
    return cast(BinaryIO, bz2.BZ2File(raw, "wb"))


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces ``path`` once it is complete; compressed by its suffix.

    What a killed process left of an earlier one is removed.  Errors of the disk name ``path``.
    """
    target = path.resolve()  # through a symbolic link, to the file that it names
    prefix = f".{sha1(target.name.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}."
    packed = stem_and_suffix(path)[1]
    draft = None
    try:
        _sweep(target.parent, prefix)
        draft, raw = _draft(target, prefix)
        with raw:
            if packed:
                with _packer(raw, packed) as inner, io.BufferedWriter(_Sink(inner)) as stream:
                    yield cast(BinaryIO, stream)
            else:
                yield raw
            raw.flush()
            if fcntl is None:  # Windows, where no open file is moved
                raw.close()
            draft.replace(target)  # under the lock, so that nobody takes it for a leftover
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


def _draft(target: Path, prefix: str) -> tuple[Path, BinaryIO]:
    """Open a new file in the folder of ``target``, locked as long as it is open."""
    while True:
        draft = target.with_name(f"{prefix}{secrets.token_hex(8)}.tmp")
        raw = draft.open("xb")
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: nobody sweeps there either
                fcntl.flock(raw, fcntl.LOCK_EX)
        if os.fstat(raw.fileno()).st_nlink:
            return draft, raw
        raw.close()  # another process swept it away before it was locked


def _sweep(folder: Path, prefix: str) -> None:
    """Remove drafts whose process has ended: their lock is free."""
    if fcntl is None:
        return
    for draft in folder.glob(f"{prefix}*.tmp"):
        with suppress(OSError), draft.open("rb") as raw:
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is being written
            draft.unlink()
