"""The checksum of a file of this package: an ``.npz``, a partition, a checkpoint.

A file holds facts, which JSON can write, and arrays.  Among the facts, or beside them, each array
stands with a CRC-32 of its bytes, its dtype and its shape; ``checksum`` is that of the text of all
of them, so that none can change, come or go.  It is for damage, not for forgery.  Files of earlier
releases state none, and are read without.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .bounded import fault

NAME = "checksum"


def checksum(facts: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> int:
    """Return the CRC-32 of facts; ``default`` converts what JSON cannot write, such as arrays."""
    rest = {name: fact for name, fact in facts.items() if name != NAME}
    return zlib.crc32(json.dumps(rest, default=default).encode())


def verify(
    path: Path,
    facts: Mapping[str, Any],
    mend: str,
    *,
    needed: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> None:
    """Raise for facts whose checksum is not what they state, or which lack one that is needed."""
    if needed or NAME in facts:
        stated, there = facts.get(NAME), checksum(facts, default)
        if type(stated) is not int or stated != there:
            why = f"its checksum is {there} but it says {str(stated)[:20]}: it is damaged"
            raise fault(path, f"{why}; {mend}.")
