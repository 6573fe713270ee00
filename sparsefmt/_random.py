"""Random numbers by counter, without a state, the same for a seed on every device."""

import numpy as np

from .errors import UnsupportedError
from .formats import checks
from .formats.arrays import Array

WORD = (1 << 64) - 1  # 64 bits set
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd


def check_seed(seed: object) -> int:
    """Check that a seed is a non-negative integer, and return it."""
    number = checks.integer("seed", seed, error=UnsupportedError)
    if number < 0:
        raise UnsupportedError(f"seed is {number}: seeds are not negative.")
    return number


def bits(counters: Array, seed: int, stream: int = 0) -> Array:
    """Draw 64 bits for each counter, as uint64; streams of one seed are independent.

    The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA'14, figure 16).
    """
    start = ((seed * 2 + 1) * GOLDEN + stream * 0xD1B54A32D192ED03) & WORD
    words = counters.astype(np.uint64)
    words *= np.uint64(GOLDEN)
    words += np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words


def uniform(counters: Array, seed: int, stream: int = 0) -> Array:
    """Draw a float64 in [0, 1) for each counter."""
    return (bits(counters, seed, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53
