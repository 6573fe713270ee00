"""Sums that tell graphs apart, whatever the order of their edges and the parts they lie in.

Not against forgery: they find the wrong folder, not a forged one.
"""

import hashlib
import json
from typing import Any

import numpy as np

from ... import _random
from ...formats.arrays import Array

#: Numbers that are looked at together.
_BLOCK = 1 << 20


def edges_sum(source: Array, target: Array, weight: Array | None) -> int:
    """Sum of a 64-bit word for each edge: of its ends, by their first numbers, and its value."""
    words = _random.bits(source, 1)
    words += _random.bits(target, 2)
    if weight is not None:
        words += _random.bits(weight.view(f"u{weight.itemsize}"), 3)
    return int(_random.bits(words, 4).sum(dtype=np.uint64))


def rows_sum(array: Array, dtype: np.dtype[Any]) -> int:
    """Sum of a 64-bit word for each row of ``(n, ...)``, of its number and its bytes."""
    n = len(array)
    width = int(np.prod(array.shape[1:]))
    factors = _random.bits(np.arange(width), 5) | np.uint64(1)
    total, step = 0, max(_BLOCK // max(width, 1), 1)
    for start in range(0, n, step):
        rows = np.ascontiguousarray(array[start : start + step], dtype)
        words = rows.reshape(len(rows), width).view(f"u{dtype.itemsize}").astype(np.uint64)
        words *= factors
        ids = _random.bits(np.arange(start, start + len(rows)), 6)
        ids += words.sum(axis=1, dtype=np.uint64)
        total += int(_random.bits(ids, 7).sum(dtype=np.uint64))
    return total & _random.WORD


def digest(facts: dict[str, Any]) -> str:
    """Give a text of 32 hexadecimal digits for facts that JSON can write."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
