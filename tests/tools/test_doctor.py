"""``sparsefmt doctor`` on machines that are not this one: drivers and CuPy are stand-ins."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from sparsefmt import cli
from sparsefmt.cli import doctor, tables
from sparsefmt.cli.doctor import Cupy, Device, Driver, Report

H100 = Device(0, "NVIDIA H100", (9, 0), 80 << 30)
T4 = Device(1, "Tesla T4", (7, 5), 16 << 30)
VERSIONS = dict.fromkeys(doctor.BASE + doctor.OPTIONAL, "1.0")
NO_DRIVER = Driver(None, (), "no NVIDIA driver")
NOTHING = Cupy((), None, None, "not installed")
WORKING = Cupy((("cupy-cuda13x", "14.2.0"),), (13, 0), (13, 0), works=True)
FAILING = Cupy(WORKING.packages, None, None, "a first kernel fails")


def report(driver=NO_DRIVER, cupy=NOTHING, **versions) -> Report:
    return Report(doctor.system(), VERSIONS | versions, driver, cupy)


class FakeDriver:
    """The five functions of libcuda that are asked, for devices of this test."""

    def __init__(self, *devices: Device, cuda: int = 13000, init: int = 0):
        self.devices, self.cuda, self.init = devices, cuda, init

    def cuInit(self, flags):
        return self.init

    def cuDriverGetVersion(self, number):
        number._obj.value = self.cuda
        return 0 if self.cuda else 3

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, handle, ordinal):
        handle._obj.value = ordinal

    def cuDeviceGetName(self, name, size, handle):
        assert size >= 64
        name.value = self.devices[handle.value].name.encode()

    def cuDeviceTotalMem_v2(self, memory, handle):
        memory._obj.value = self.devices[handle.value].memory

    def cuDeviceGetAttribute(self, value, attribute, handle):
        value._obj.value = self.devices[handle.value].capability[{75: 0, 76: 1}[attribute]]


class CompileError(Exception):
    """CuPy's CompileException derives from nothing narrower."""


def fake_cupy(*, runtime=None, kernel=None, result: int = 42):
    """A CuPy whose runtime version or first kernel may raise what is given."""

    def raw_kernel(code, name):
        assert name in code
        if kernel:
            raise kernel
        return lambda grid, block, arguments: arguments[0].__setitem__(0, result)

    return SimpleNamespace(
        __version__="14.2.0",
        zeros=lambda n, dtype: [0] * n,
        RawKernel=raw_kernel,
        cuda=SimpleNamespace(
            runtime=Mock(runtimeGetVersion=Mock(return_value=13020, side_effect=runtime)),
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 1)),
            compiler=SimpleNamespace(CompileException=CompileError),
        ),
    )


def printed(found: Report) -> str:
    console = tables.console()
    with console.capture() as captured:
        tables.show(console, tables.examination(found))
    return captured.get()


# The driver


def test_driver_reads_every_device():
    assert doctor.read_driver(FakeDriver(H100, T4, cuda=12040)) == Driver((12, 4), (H100, T4))


@pytest.mark.parametrize(
    ("library", "cuda", "problem"),
    [
        (FakeDriver(init=100), (13, 0), "cuInit gave 100"),
        (FakeDriver(init=999, cuda=0), None, "cuInit gave 999"),
        (FakeDriver(), (13, 0), "the driver found no device"),
    ],
)
def test_driver_without_devices_says_why(library, cuda, problem):
    found = doctor.read_driver(library)
    assert (found.cuda, found.devices) == (cuda, ())
    assert problem in found.problem


def test_no_driver_is_no_error(monkeypatch):
    missing = Mock(side_effect=OSError("libcuda.so.1: cannot open shared object file"))
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert doctor.find_driver() == Driver(None, (), "no NVIDIA driver (libcuda.so.1 was not found)")
    missing.assert_called_with("libcuda.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(H100))
    assert doctor.find_driver().devices == (H100,)


# CuPy


def test_cupy_works_when_a_kernel_gave_the_right_result(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    found = doctor.find_cupy(Driver((13, 0), (H100,)))
    assert found.works
    assert (found.runtime, found.nvrtc, found.problem) == ((13, 2), (13, 1), "")


@pytest.mark.parametrize(
    ("cupy", "problem"),
    [
        (fake_cupy(kernel=CompileError("nvrtc: error:\n  no header")), "nvrtc: error: no header"),
        (fake_cupy(kernel=RuntimeError("x" * 500)), "xxx..."),
        (fake_cupy(kernel=MemoryError()), "a first kernel fails: MemoryError"),
        (fake_cupy(result=41), "gave 41 instead of 42"),
        (fake_cupy(runtime=RuntimeError("libcudart is gone")), "libraries are missing: libcudart"),
        (fake_cupy(runtime=ImportError("libnvrtc.so.13")), "libraries are missing: libnvrtc"),
    ],
)
def test_cupy_that_does_not_work_says_why(monkeypatch, cupy, problem):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    found = doctor.find_cupy(Driver((13, 0), (H100,)))
    assert not found.works
    assert problem in found.problem
    assert "\n" not in found.problem
    assert len(found.problem) < 200
    assert report(Driver((13, 0), (H100,)), found).broken


def test_cupy_without_a_device_is_not_tried(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(kernel=RuntimeError("must not run")))
    found = doctor.find_cupy(Driver(None, (), "no NVIDIA driver"))
    assert (found.works, found.problem) == (False, "no NVIDIA driver")
    assert not report(cupy=found).broken


@pytest.mark.parametrize("installed", [True, False])
def test_cupy_that_cannot_be_imported(monkeypatch, installed):
    monkeypatch.setitem(sys.modules, "cupy", None)
    old = {"cupy-cuda12x": "14.2.0"} if installed else {}
    monkeypatch.setattr(doctor, "version", old.get)
    found = doctor.find_cupy(Driver((13, 0), (H100,)))
    assert found.problem == ("it cannot be imported" if installed else "not installed")
    assert report(Driver((13, 0), (H100,)), found).broken == installed


def test_cupy_whose_import_fails_in_another_way(monkeypatch):
    fail = Mock(side_effect=RuntimeError("built for another NumPy"))
    monkeypatch.setattr(doctor, "import_cupy", fail)
    assert "its import fails: built for another" in doctor.find_cupy(Driver(None, ())).problem
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setattr(doctor, "version", lambda name: None)  # built from source
    assert doctor.find_cupy(Driver(None, ())).packages == (("cupy", "14.2.0"),)


# What follows


def test_gpu_that_works():
    found = report(Driver((13, 0), (H100, T4)), WORKING)
    assert not found.broken
    assert list(doctor.advice(found)) == []
    runs = doctor.runs(found)
    assert runs["CUDA kernels"] == (True, "0: NVIDIA H100; 1: Tesla T4")
    assert runs["tensor cores"] == (True, "0: NVIDIA H100")
    runs = doctor.runs(report(Driver((13, 0), (T4,)), WORKING))  # an old one
    assert runs["CUDA kernels"][0]
    assert runs["tensor cores"] == (False, "needs compute capability 8.0: CUDA kernels run instead")


def test_machines_without_a_visible_gpu_are_well():
    found = report()
    assert not found.broken
    assert list(doctor.advice(found)) == []
    assert doctor.runs(found)["CUDA kernels"] == (False, "no NVIDIA driver")
    (advice,) = doctor.advice(report(Driver((13, 0), (), "no device")))
    assert "CUDA_VISIBLE_DEVICES" in advice


@pytest.mark.parametrize(
    ("cuda", "cupy", "advice"),
    [
        ((12, 4), NOTHING, "pip install 'sparsefmt[cuda12]'"),
        ((13, 1), NOTHING, "pip install 'sparsefmt[cuda13]'"),
        (None, NOTHING, "pip install 'sparsefmt[cuda13]'"),
        ((11, 8), NOTHING, "a newer NVIDIA driver: this one runs CUDA 11.8, CuPy needs 12"),
        ((13, 0), FAILING, "pip install --force-reinstall 'sparsefmt[cuda13]'"),
    ],
)
def test_gpu_without_a_working_cupy_says_what_to_install(cuda, cupy, advice):
    found = report(Driver(cuda, (H100,)), cupy)
    assert advice in list(doctor.advice(found))
    able, why = doctor.runs(found)["CUDA kernels"]
    assert not able
    assert why == f"CuPy: {cupy.problem}"


def test_missing_libraries_are_named():
    found = report(numba=None, torch=None, matplotlib=None)
    assert found.broken
    assert list(doctor.advice(found)) == [
        "pip install numba",
        "pip install 'sparsefmt[torch]'  (only for training from PyTorch)",
        "pip install 'sparsefmt[cli]'",
    ]
    runs = doctor.runs(found)
    assert runs["CPU twins (numba)"] == (False, "numba is not installed")
    assert runs["PyTorch layer"] == (False, "torch is not installed")
    assert not runs["pictures"][0]


def test_two_cupys_overwrite_each_other():
    both = Cupy((("cupy-cuda13x", "14"), ("cupy-cuda12x", "14")), (13, 0), (13, 0), works=True)
    found = report(Driver((13, 0), (H100,)), both)
    assert found.broken
    assert "pip uninstall cupy-cuda13x cupy-cuda12x" in next(doctor.advice(found))


# The command


@pytest.mark.parametrize("driver", [Driver(None, (), "no driver"), Driver((12, 4), (H100, T4))])
@pytest.mark.parametrize("cupy", [NOTHING, WORKING])
def test_report_is_printed_within_80_columns(monkeypatch, driver, cupy):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(report(driver, cupy, torch=None))
    assert max(map(len, text.splitlines())) <= 80
    assert "torch" in text
    assert "not installed" in text
    for device in driver.devices:
        assert device.name in text


def test_exit_code_says_whether_something_is_broken(monkeypatch, capsys):
    for found, code, text in (
        (report(torch=None), 0, "sparsefmt[torch]"),
        (report(), 0, "nothing to install"),
        (report(scipy=None), 1, "pip install scipy"),
    ):
        monkeypatch.setattr(doctor, "examine", lambda found=found: found)
        assert cli.main(["doctor"]) == code
        assert text in capsys.readouterr().out


def test_examination_of_this_machine_never_raises():
    found = doctor.examine()
    assert found.missing == []
    assert found.system["Python"].startswith("3.")
    assert doctor.version("no-such-distribution") is None


def test_doctor_loads_neither_torch_nor_matplotlib_nor_numba():
    code = (
        "import sys\nfrom sparsefmt.cli import main\ncode = main(['doctor'])\n"
        "print(*{'torch', 'matplotlib', 'numba'} & set(sys.modules), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.split() == []
    assert done.returncode == 0


@pytest.mark.gpu
def test_doctor_finds_the_gpu(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "compute capability" in text
    assert doctor.examine().cupy.works
