"""What every operation must satisfy, once for each row of the table."""

import numba
import numpy as np
import pytest
from laws.cases import CASES, NOT_REPEATED, TORCH_ALONE
from op_cases import DTYPES, name_of, put

from sparsefmt import CBSR, ops
from sparsefmt.errors import DeviceError
from sparsefmt.ops.engine.call import question
from sparsefmt.ops.engine.table import operations

SHORT_ROWS = np.arange(60) % 23
REPLAYS = 100
#: The others are of float32's loops and kernels, and rooms compare each dtype with its oracle.
ALL_DTYPES = [
    dtype if dtype is np.float32 else pytest.param(dtype, marks=pytest.mark.grid)
    for dtype in DTYPES
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def placed(xp, case, dtype, lengths=None, *, seed=0):
    """Return matrix and arguments of a case on a device."""
    A = case.matrix(dtype) if lengths is None else case.matrix(dtype, lengths)
    return put(xp, A), [put(xp, a) for a in case.arguments(A, dtype, seed=seed)]


def copies(A, args):
    return [a.copy() for a in (A, *args)]


def arrays_of(arg):
    """Return the arrays of features: places and values of a CBSR."""
    return (arg.indices, arg.data) if isinstance(arg, CBSR) else (arg,)


def equal(xp, a, b):
    """Return True if two arrays or matrices are the same, bit for bit."""
    if isinstance(a, xp.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a == b


def test_every_row_has_a_case():
    rows = {row for case in CASES for row in case.rows or (case.name,)}
    assert not rows & (TORCH_ALONE | NOT_REPEATED)
    assert rows | TORCH_ALONE | NOT_REPEATED == {op.name for op in operations()}


class Listener:
    """A question that notes the rows which are called, and lets all run."""

    def __init__(self):
        self.rows = set()

    def __bool__(self):
        return False  # it takes no remarks

    def runs(self, row, *args, **options):
        self.rows.add(row.name)
        return True


@every_case
def test_a_case_runs_its_rows(xp, case):
    A, args = placed(xp, case, np.float32, SHORT_ROWS)
    listener = Listener()
    token = question.set(listener)
    try:
        case.run(A, args)
    finally:
        question.reset(token)
    assert listener.rows >= set(case.rows or (case.name,))


@every_case
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_results_repeat_bit_for_bit(xp, case, dtype):
    """On the CPU with any number of threads too; rows are cut among blocks."""
    A, args = placed(xp, case, dtype)
    first = case.run(A, args)
    assert first
    try:
        for count in (1, 1, *[numba.config.NUMBA_NUM_THREADS] * 3):
            numba.set_num_threads(count)
            for a, b in zip(case.run(A, args), first, strict=True):
                assert equal(xp, a, b)
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


@every_case
def test_inputs_are_not_changed(xp, case):
    A, args = placed(xp, case, np.float32, SHORT_ROWS)
    before = copies(A, args)
    case.run(A, args)
    assert all(equal(xp, a, b) for a, b in zip((A, *args), before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.is_mixed], ids=str)
def test_mixed_devices_are_refused(case):
    import cupy

    A = case.matrix(np.float32, SHORT_ROWS)
    args = case.arguments(A, np.float32)
    for mixed in ((put(cupy, A), args), (A, [put(cupy, a) for a in args])):
        with pytest.raises(DeviceError, match="on cuda:0"):
            case.run(*mixed)


@pytest.mark.gpu
@every_case
def test_work_runs_on_the_current_stream_and_can_be_captured(case):
    """The first call may read sizes on the host, and cut rows into chunks."""
    import cupy

    ops.compile_all()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        A, args = placed(cupy, case, np.float32, SHORT_ROWS)
        for _ in range(2):
            case.run(A, args)
        stream.synchronize()
        stream.begin_capture()
        captured = case.run(A, args)
        graph = stream.end_capture()
        for seed in range(REPLAYS):
            fresh = case.arguments(case.matrix(np.float32, SHORT_ROWS), np.float32, seed=seed)
            for arg, value in zip(args, fresh, strict=True):
                for there, values in zip(arrays_of(arg), arrays_of(value), strict=True):
                    there.set(values)
            for result in captured:
                result.fill(np.nan if result.dtype.kind == "f" else 0)
            graph.launch()
            if seed % 10 == 0:
                stream.synchronize()
                for a, b in zip(captured, case.run(A, args), strict=True):
                    assert equal(cupy, a, b)
