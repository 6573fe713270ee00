"""The checksum of a file of this package: an ``.npz``, a partition, a checkpoint.

A file holds facts, which JSON can write, and arrays.  Among the facts, or beside them, each array
stands with a CRC-32 of its bytes, its dtype and its shape; ``checksum`` is that of the text of all
of them, so that damage to any of them, or the loss of one, is seen.  It is no help against forgery.
Files of earlier releases state none, and are read without.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .bounded import fault

NAME = "checksum"


def checksum(facts: Mapping[str, Any], *, sort_keys: bool = True) -> int:
    """Return the CRC-32 of facts, whatever their order."""
    rest = {name: fact for name, fact in facts.items() if name != NAME}
    return zlib.crc32(json.dumps(rest, sort_keys=sort_keys).encode())


def verify(path: Path, facts: Mapping[str, Any], mend: str, *, needed: bool = False) -> None:
    """Raise for facts whose checksum is not what they state, or which lack one that is needed."""
    if needed or NAME in facts:
        expected, actual = facts.get(NAME), checksum(facts)
        if type(expected) is not int:
            raise fault(path, f"its checksum is no number: it is damaged; {mend}.")
        # The first files that had a checksum took it of the facts in their order.
        if expected != actual and expected != checksum(facts, sort_keys=False):
            why = f"its checksum is {actual} but it says {str(expected)[:20]}: it is damaged"
            raise fault(path, f"{why}; {mend}.")
