"""Pickles as inert records: what they name is never looked up, and nothing of them is run."""

import io
import pickle
import re
from collections.abc import Callable, Mapping
from struct import unpack
from typing import Any, ClassVar, cast


def load(raw: bytes, known: Mapping[str, str], needs: str) -> Any:
    """Read a pickle that may name what the patterns of ``known`` fit: a kind of records for each.

    Those of "mapping" are dictionaries, and those of "type" cannot be called.  ``needs`` is the
    kind of file, for errors.
    """
    return _Unpickler(raw, known, needs).load()


class Record:
    """A call that a pickle asks for, its arguments and the state to set; nothing of it is run."""

    kind = ""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: object) -> "Record":
        """Return a record of a call's arguments."""
        if cls.kind == "set":
            for key in cast(list[Any], args[0]):
                check_key(key)
        if cls.kind == "encode" and args[1:] != ("latin1",):
            raise ValueError("bytes encoded otherwise than as latin1")
        self = object.__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state


def check_key(key: Any) -> None:
    """Raise for a key of a dictionary or set that may collide with others, or hash without end."""
    good = abs(key) < 1 << 63 if isinstance(key, int) else isinstance(key, str | bytes)
    if not good and getattr(key, "kind", "") not in ("encode", "scalar"):
        raise TypeError(f"a {type(key).__name__} as a key, not a text or 64-bit integer")


class Table(dict[Any, Any]):
    """A dictionary whose keys cannot be made to collide, nor to be hashed without end."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        check_key(key)
        super().__setitem__(key, value)


class MappingRecord(Table):
    """A dictionary that begins empty; its only argument may be a class, for missing keys."""

    __slots__ = ()
    kind = "mapping"

    def __init__(self, *args: object) -> None:
        if not all(isinstance(arg, type) for arg in args):  # items, which would be hashed unseen
            raise TypeError("a mapping with items as arguments")
        super().__init__()


class TypeRecord(Record):
    """A class that is only named: a call would allocate what a pickle asks for."""

    kind = "type"

    def __new__(cls, *args: object) -> "TypeRecord":
        """Raise."""
        raise TypeError(f"a call of {cls.__name__}")


_BASES: dict[str, type] = {"mapping": MappingRecord, "type": TypeRecord}
#: Characters of a name; patterns may take the square of their number.
_LONGEST = 200


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python: that in C fills a memo as large as a pickle asks for."""

    # Extension codes and persistent ids would reach what the program registered; sets hash.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID)
        and bytes([code]) not in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET)
    }

    def __init__(self, raw: bytes, known: Mapping[str, str], needs: str) -> None:
        super().__init__(io.BytesIO(raw), encoding="latin1")
        self.memo = Table()
        self._known, self._needs = known, needs
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return this pickle's class of records: it cannot reach, or change, any that exists."""
        if len(module) + len(name) > _LONGEST:
            raise pickle.UnpicklingError(f"it asks for a name of {len(module) + len(name)} letters")
        wanted = f"{module}.{name}"
        for kind, pattern in self._known.items():
            if re.fullmatch(pattern, wanted):
                new = type(kind, (_BASES.get(kind, Record),), {"kind": kind})
                return self._classes.setdefault(kind, new)
        raise pickle.UnpicklingError(f"it asks for {wanted}, which no {self._needs} needs")

    def persistent_load(self, pid: object) -> Any:
        """Return a record of bytes that lie elsewhere."""
        return Record(pid)

    def _load_bytearray8(self: Any) -> None:
        """Read bytes before they are allocated."""
        (size,) = unpack("<Q", self.read(8))
        self.append(self.read(size))

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray8

    def _load_empty_dict(self: Any) -> None:
        self.append(Table())

    dispatch[pickle.EMPTY_DICT[0]] = _load_empty_dict

    def _load_dict(self: Any) -> None:
        items, table = self.pop_mark(), Table()
        for key, value in zip(items[::2], items[1::2], strict=True):
            table[key] = value
        self.append(table)

    dispatch[pickle.DICT[0]] = _load_dict
