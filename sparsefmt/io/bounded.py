"""Streams of graph files: bounded decompression, atomic writes, errors that name file and line."""

import bz2
import errno
import gzip
import io
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha1
from pathlib import Path
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


class _Members(io.RawIOBase):
    """The text of compressed members, one behind another; other bytes behind them are refused."""

    def __init__(self, raw: BinaryIO, path: Path, packed: str) -> None:
        self._raw, self._path, self._zeros = raw, path, b"\0" * (packed == ".gz")
        self._new: Any = (
            bz2.BZ2Decompressor if packed == ".bz2" else partial(zlib.decompressobj, 31)
        )
        self._member: Any = None
        self._members, self._size, self._rest = 0, 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view, text = memoryview(buffer), b""
        while not text and self._begun():
            member, ended = self._member, False
            if not self._rest and getattr(member, "needs_input", True):
                self._rest = self._raw.read(_BLOCK)
                ended = not self._rest
            text = member.decompress(self._rest, len(view))
            self._rest = getattr(member, "unconsumed_tail", b"")
            self._size += len(text)
            if member.eof:
                self._member, self._rest = None, member.unused_data
                self._members += 1
            elif ended and not text:
                raise EOFError("it ends early")
        view[: len(text)] = text
        return len(text)

    def _begun(self) -> bool:
        """Begin the next member if none is open; return False at the end of the file."""
        while self._member is None:
            self._rest = self._rest or self._raw.read(_BLOCK)
            if not self._rest:
                return False
            if self._members > _MOST_MEMBERS + self._size // 1024:
                raise fault(
                    self._path,
                    f"{self._members} compressed pieces hold {self._size} bytes: unpack it, and "
                    "pack it in one piece.",
                )
            if self._members:  # behind which tapes have zeros
                self._rest = self._rest.lstrip(self._zeros) if self._zeros else self._rest
            self._member = self._new() if self._rest else None
        return True


class _Repeated(io.RawIOBase):
    """A text that is read several times, each block of which must stay the same.

    ``sums`` has the CRC-32 of the blocks that were read before, and gets those of new ones.
    """

    def __init__(self, inner: BinaryIO, path: Path, sums: list[int]) -> None:
        self._inner, self._path, self._sums = inner, path, sums
        self._number, self._block = 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._block:
            self._block = self._inner.read(_CHUNK)
            self._sums += [zlib.crc32(self._block)] * (self._number == len(self._sums))
            if self._sums[self._number] != zlib.crc32(self._block):
                raise fault(self._path, "it changed while it was read: read it again.")
            self._number += bool(self._block)  # the end is one more, which comes again
        size = min(len(buffer), len(self._block))
        memoryview(buffer)[:size] = self._block[:size]
        self._block = self._block[size:]
        return size


class _Bounded(io.RawIOBase):
    """A stream that raises ``FileFormatError`` where it is damaged or passes ``limit`` bytes."""

    def __init__(self, inner: BinaryIO, path: Path, limit: int, tail: bytes) -> None:
        self._inner, self._path, self._limit, self._tail = inner, path, limit, tail
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        try:
            block = self._inner.read(len(view))
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise fault(
                self._path, f"the compressed data is damaged ({error}): copy the file again."
            ) from error
        if not block:
            block, self._tail = self._tail, b""
        self._done += len(block)
        if self._done > self._limit:
            raise fault(
                self._path,
                f"the text has more than max_bytes={self._limit} bytes: "
                "raise max_bytes if you trust the file.",
            )
        view[: len(block)] = block
        return len(block)


@contextmanager
def reading(
    path: Path, max_bytes: int, *, tail: bytes = b"", sums: list[int] | None = None
) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a text file, at most ``max_bytes``, and then ``tail``.

    A text that is opened again with the same list ``sums`` is refused where it has changed.
    """
    packed = stem_and_suffix(path)[1]
    with path.open("rb") as raw:
        inner: Any = raw
        if packed:
            inner = io.BufferedReader(_Members(raw, path, packed), _CHUNK)
        if sums is not None:
            inner = _Repeated(inner, path, sums)
        with io.BufferedReader(
            _Bounded(inner, path, max_bytes + len(tail), tail), _CHUNK
        ) as stream:
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
