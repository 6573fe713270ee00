"""What a launch hands to the driver, seen by a stand-in for ``cuLaunchKernelEx``."""

import ctypes
import re
import struct
import threading
from types import SimpleNamespace

import pytest

from sparsefmt.errors import KernelLaunchError
from sparsefmt.ops.engine import jit
from sparsefmt.ops.matmul import cuda as matmul_cuda

FUNCTION, STREAM = 0x7F00_0000_1230, 0x7F00_0000_4560
INVALID_VALUE, INVALID_CONTEXT = 1, 201
POINTERS = [ctypes.c_void_p] * 4
C_TYPES = {"P": ctypes.c_void_p, "q": ctypes.c_int64, "I": ctypes.c_uint32, "i": ctypes.c_int32}
#: Of each type, a first value whose bytes are all in use.
FIRST = {"P": 0x7FFF_FFFF_FF00, "q": -(2**62) - 5, "I": 0xFFFF_FF00, "i": -(2**30) - 3}


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        *((f"{what}Dim{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint),
    )


class CudaError(Exception):
    pass


class Driver:
    """Keeps what it reads at each launch and returns the next of ``statuses``, then success."""

    def __init__(self):
        self.launches = []
        self.statuses = []
        self.before_reading = lambda: None
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, *POINTERS)(self._launch)
        # A function of a loaded library, as ctypes sees it: of unknown arguments.
        self.function = ctypes.CFUNCTYPE(ctypes.c_int)(
            ctypes.cast(self._callback, ctypes.c_void_p).value
        )

    def _launch(self, config, function, parameters, extra):
        self.before_reading()
        one, packed, two, size, end = (ctypes.c_void_p * 5).from_address(extra)
        size = ctypes.c_size_t.from_address(size).value
        self.launches.append(
            SimpleNamespace(
                config=LaunchConfig.from_buffer_copy(ctypes.string_at(config, 56)),
                function=function,
                one_way_only=(parameters, one, two, end) == (None, 1, 2, None),
                aligned=config % 8 == 0 and packed % 16 == 0,
                parameters=ctypes.string_at(packed, size),
            )
        )
        return self.statuses.pop(0) if self.statuses else 0


class Cupy:
    """As much of CuPy as a launch uses; ``calls`` has what it was asked to do."""

    def __init__(self):
        self.calls = []
        self.failure = None  #: of a kernel, raised by the next synchronisation
        self.device = 0
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDevice=lambda: self.device,
                setDevice=lambda device: self.calls.append(("setDevice", device)),
                streamSynchronize=self._synchronize,
                CUDARuntimeError=CudaError,
            ),
            driver=SimpleNamespace(check_status=self._check, CUDADriverError=CudaError),
        )

    def _synchronize(self, stream):
        self.calls.append(("synchronize", stream))
        if self.failure:
            raise CudaError(self.failure)

    def _check(self, status):
        if status:
            raise CudaError(f"CUDA_ERROR {status}")


@pytest.fixture
def cupy(monkeypatch):
    cupy = Cupy()
    monkeypatch.setattr(jit, "import_cupy", lambda: cupy)
    return cupy


@pytest.fixture
def driver(cupy, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(jit, "_driver", lambda: driver.function)
    monkeypatch.setattr(jit, "_compile", lambda device, file, name: (None, FUNCTION))
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit.checks, "DEBUG", False)
    return driver


def load(layout="Pi", kernel="k"):
    return jit.load("file.cu", kernel, layout, ("float32", "int32"))


def codes(layout):
    """``"2Pi"`` -> ``"PPi"``."""
    return "".join(one * int(times or 1) for times, one in re.findall(r"(\d*)(\D)", layout))


@pytest.mark.parametrize(
    ("blocks", "grid"), [(5, (5, 1, 1)), ((5, 3), (5, 3, 1)), (0, (1, 1, 1)), ((0, 2), (1, 2, 1))]
)
def test_a_launch_names_function_grid_block_and_stream(driver, blocks, grid):
    load()(blocks, (1, 2), threads=96, stream=STREAM)
    (launch,) = driver.launches
    config = launch.config
    assert launch.function == FUNCTION
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == grid
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (96, 1, 1)
    assert config.hStream == STREAM
    assert (config.sharedMemBytes, config.attrs, config.numAttrs) == (0, None, 0)


@pytest.mark.parametrize("layout", ["P", "iP", "Ii", "iqIP", *matmul_cuda.PARAMETERS.values()])
def test_parameters_lie_as_in_c(driver, layout):
    types = codes(layout)
    args = [FIRST[code] + k for k, code in enumerate(types)]
    fields = [(f"p{k}", C_TYPES[code]) for k, code in enumerate(types)]
    oracle = type("Parameters", (ctypes.Structure,), {"_fields_": fields})
    last = getattr(oracle, f"p{len(types) - 1}")
    load("40P", "longer")(1, (2**48,) * 40, stream=0)  # which must leave nothing behind
    load(layout)(1, tuple(args), stream=0)
    launch = driver.launches[-1]
    assert launch.parameters == bytes(oracle(*args))[: last.offset + last.size]
    assert launch.aligned
    assert launch.one_way_only


def test_threads_do_not_mix_their_launches(driver):
    """All are inside the driver before it reads what the first one asked for."""
    together = threading.Barrier(8, timeout=60)
    driver.before_reading = together.wait
    kernel, rounds = load(), 20

    def work(thread):
        for k in range(rounds):
            kernel(thread + 1, (thread, k), stream=thread + 1)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(together.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {
        (one.config.gridDimX - 1, one.config.hStream - 1, *struct.unpack("Pi", one.parameters))
        for one in driver.launches
    }
    assert found == {(k, k, k, turn) for k in range(together.parties) for turn in range(rounds)}


def test_a_ready_launch_puts_a_call_between_what_is_known(driver):
    ready = load("PiPi").ready((5, 3), (11,), (44,), threads=96, shared=7)
    for turn in range(2):
        ready(STREAM + turn, 22 + turn, 33)
        load("PiPi")((5, 3), (11, 22 + turn, 33, 44), threads=96, shared=7, stream=STREAM + turn)
        mine, plain = driver.launches[-2:]
        assert bytes(mine.config) == bytes(plain.config)
        assert (mine.function, mine.parameters) == (plain.function, plain.parameters)


def test_a_ready_launch_refuses_too_large_a_grid_before_it_is_called(driver):
    with pytest.raises(KernelLaunchError, match="a grid of 2147483648 x 1 blocks"):
        load().ready(jit.MAX_BLOCKS + 1)
    assert not driver.launches


def test_a_thread_without_a_context_gets_one(cupy, driver):
    driver.statuses = [INVALID_CONTEXT]
    cupy.device = 3
    load()(5, (1, 2), stream=STREAM)
    assert cupy.calls == [("setDevice", 3)]
    first, second = ((bytes(one.config), one.parameters) for one in driver.launches)
    assert first == second


@pytest.mark.parametrize("statuses", [[INVALID_VALUE], [INVALID_CONTEXT] * 2])
def test_a_refused_launch_names_its_kernel(driver, statuses):
    driver.statuses = list(statuses)
    with pytest.raises(KernelLaunchError, match=rf"^k<float, int>: CUDA_ERROR {statuses[-1]}$"):
        load()(5, (1, 2), stream=STREAM)


def test_too_large_a_grid_is_not_launched(driver):
    kernel = load()
    kernel(jit.MAX_BLOCKS, (1, 2), stream=STREAM)
    for blocks in (jit.MAX_BLOCKS + 1, (jit.MAX_BLOCKS + 1, 1)):
        too_many = "k<float, int>: a grid of 2147483648 x 1 blocks"
        with pytest.raises(KernelLaunchError, match=too_many):
            kernel(blocks, (1, 2), stream=STREAM)
    assert len(driver.launches) == 1


def test_a_launch_is_asynchronous_unless_debugged(cupy, driver, monkeypatch):
    cupy.failure = "misaligned address"
    load()(5, (1, 2), stream=STREAM)
    assert cupy.calls == []
    monkeypatch.setattr(jit.checks, "DEBUG", True)
    with pytest.raises(KernelLaunchError, match=r"^k<float, int>: misaligned address$"):
        load()(5, (1, 2), stream=STREAM)
    assert cupy.calls == [("synchronize", STREAM)]


def test_a_kernel_is_loaded_once_on_each_device(cupy, driver):
    assert load() is load()
    first, cupy.device = load(), 1
    assert load() is not first


def test_an_old_driver_is_named(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(KernelLaunchError, match="Install a driver for CUDA 12"):
        jit._driver.__wrapped__()
