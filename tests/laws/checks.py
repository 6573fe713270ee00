"""How a call of an operation is placed on a device, and compared with its oracle."""

import numpy as np
from op_cases import GUARD, far_apart, intact, poisoned, put

from sparsefmt import CBSR
from sparsefmt.testing import assert_close

SHORT_ROWS = np.arange(60) % 23


def placed(xp, case, dtype=np.float32, kind=SHORT_ROWS, *, seed=0, feat=33):
    """Return matrix and arguments of a case on a device."""
    A = case.matrix(dtype, kind)
    args = case.arguments(A, dtype, seed=seed, feat=feat)
    return put(xp, A), {name: put(xp, value) for name, value in args.items()}


def arrays_of(arg):
    """Return the arrays of features: places and values of a CBSR."""
    return (arg.indices, arg.data) if isinstance(arg, CBSR) else (arg,)


def equal(xp, a, b):
    """Return True if two arrays or matrices are the same, bit for bit."""
    if isinstance(a, xp.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a == b


def all_equal(xp, first, second):
    return all(equal(xp, a, b) for a, b in zip(first, second, strict=True))


def check(xp, case, A, args, *, place=put, matrix=put):
    """Check results against the oracle; ``out`` is poisoned, and no guard is touched."""
    there = {name: place(xp, value) for name, value in args.items()}
    expected = case.expected(A, args)
    options, buffers = {}, []
    if "out" in case.parameters:
        dtype = next(iter(args.values())).dtype
        options["out"], buffer = poisoned(xp, expected[0][0].shape, dtype)
        buffers.append(buffer)
    results = case.run(matrix(xp, A), there, **options)
    assert "out" not in options or results[0] is options["out"]
    assert len(results) == len(expected)
    dtypes = {value.dtype for value in args.values()}
    if case.widens and {dtype.itemsize for dtype in dtypes} == {2}:
        dtypes = {np.dtype(np.float32)}
    for result, (exact, bound) in zip(results, expected, strict=True):
        assert result.dtype in dtypes
        assert_close(result, exact, bound=bound)
    assert all(intact(xp, buffer) for buffer in buffers)


def aside(xp, a):
    """Return every second value of a wider array, on the device."""
    if isinstance(a, CBSR) or a.ndim == 0:
        return put(xp, a)
    wide = xp.full((*a.shape[:-1], 2 * a.shape[-1] + 1), np.nan, a.dtype)
    wide[..., 1::2] = xp.asarray(a)
    return wide[..., 1::2]


def apart(gap, shift):
    """Return a function that lays rows that far apart on the device."""
    return lambda xp, a: (
        put(xp, a) if isinstance(a, CBSR) else far_apart(xp, a, gap=gap, shift=shift)
    )


LAYOUTS = {
    **{f"apart {gap}, {shift}": apart(gap, shift) for gap, shift in ((1, 0), (3, 1), (8, 8))},
    "aside": aside,
    "heads last": lambda xp, a: (
        xp.asarray(np.asfortranarray(a), order="F") if isinstance(a, np.ndarray) else put(xp, a)
    ),
    "turned around": lambda xp, a: (
        put(xp, np.ascontiguousarray(a[::-1]))[::-1] if isinstance(a, np.ndarray) else put(xp, a)
    ),
}


def guarded_memory(xp, monkeypatch):
    """Fill what is allocated with NaN between guard bands; return all such buffers."""
    buffers, full = [], xp.full

    def guarded(shape, dtype=np.float64, **_):
        if np.dtype(dtype).kind not in "fV":  # bytes of a workspace are NaN too
            return full(shape, 255 if np.dtype(dtype).itemsize == 1 else 0, dtype)
        size = int(np.prod(shape))
        buffers.append(full(size + 2 * GUARD, np.nan, dtype))
        return buffers[-1][GUARD : GUARD + size].reshape(shape)

    monkeypatch.setattr(xp, "empty", guarded)
    return buffers
