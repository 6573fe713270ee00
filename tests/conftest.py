"""What every test may ask for: an array module per device, the shared graphs, one profile."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# The same examples on every run and machine; SPARSEFMT_EXAMPLES=2000 for a longer search.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    max_examples=int(os.environ.get("SPARSEFMT_EXAMPLES", "50")),
)
settings.load_profile("ci")

os.environ.setdefault("MPLBACKEND", "Agg")

# Modules hold a million objects, and whoever walks them all does so for tenths of a second.
gc.set_threshold(50_000, *gc.get_threshold()[1:])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """One thread in each worker, set before the workers start: they share the cores already."""
    for pool in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ.setdefault(f"{pool}_NUM_THREADS", "1")


@cache
def why_no_gpu() -> str:
    """The reason why tests marked ``gpu`` cannot run here, empty where they can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return ""


#: The file that runs every loop, and so compiles it for all others; it begins first.
COMPILES = "laws/test_laws_of_operations.py"
#: Files that take longest, which begin before others: at the end a worker would run one alone.
LONGEST = (
    *("laws/test_laws_of_torch.py", "laws/test_laws_of_autograd.py", "engine/test_kernels.py"),
    *("distributed/test_train_processes.py", "autograd/test_autograd_compile.py"),
    "tools/test_testing.py",
)


def _order(item: pytest.Item) -> tuple[object, ...]:
    """Return the key to sort tests by: the rooms of compiled loops wait for the file above."""
    path = item.path.as_posix()
    return (
        not path.endswith(COMPILES),
        item.path.parent.name in _COMPILED,
        not path.endswith(LONGEST),
        item.path,  # workers import files in different orders, and must agree on that of tests
    )


def _is_compiled(item: pytest.Item) -> bool:
    """Return True if the test is of the loops that numba compiles."""
    room, fixtures = item.path.parent.name, item.fixturenames  # type: ignore[attr-defined]
    return room in _COMPILED and "small_work" not in fixtures


def _rare(params: dict[str, Any]) -> set[str]:
    """Find the dtypes among the parameters for which `make test` compiles no loop of its own."""
    values = params.values()
    dtypes = (v for v in values if isinstance(v, type | str) or type(v).__name__ == "dtype")
    names = {getattr(value, "__name__", str(value)).removeprefix("torch.") for value in dtypes}
    return names & {"float64", "int64"}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    items.sort(key=_order)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Make the calls that a test is for; mark ``grid`` what others of the same product cover.

    ``where(lambda a, b: ...)`` says for which parameters the test is.

    ``covering("a", "b", "c", one_in=3)`` keeps a diagonal: where the numbers of the parameters'
    values add up to a multiple of 3.  Each value of each is then met, and each pair of values
    where another parameter has three or more.  Nor are loops of operations compiled for float64
    and int64 at a time: 50 loops, 2 s each.

    What `-m` leaves out is not made: half of all, which each worker would make.
    """
    yield
    calls, test = metafunc._calls, metafunc.definition
    for (holds,) in (mark.args for mark in test.iter_markers("where")):
        calls[:] = [c for c in calls if holds(*(c.params[n] for n in signature(holds).parameters))]
    left_out = {*re.findall(r"\bnot (\w+)", metafunc.config.getoption("markexpr"))}
    if "gpu" in left_out:
        calls[:] = [c for c in calls if all(m.name != "gpu" for m in c.marks)] or calls[:1]
    numbers: dict[str, dict[str, int]] = {}
    for call in calls:
        is_grid = test.path.parent.name in _COMPILED and len(_rare(call.params)) == 2
        for mark in test.iter_markers("covering"):
            total = 0
            for name in mark.args:
                known = numbers.setdefault(name, {})
                total += known.setdefault(str(call.params[name]), len(known))
            is_grid = is_grid or total % mark.kwargs["one_in"] > 0
        if is_grid:
            call.marks.append(pytest.mark.grid.mark)
    if left_out & {m.name for m in test.iter_markers()}:
        del calls[1:]
    calls[:] = [c for c in calls if not left_out & {m.name for m in c.marks}] or calls[:1]


#: What covers the format layer; a tracer would slow down the tests of the layers above by half.
_COVERING = {"engine", "formats", "house", "interop", "io", "tools"}


#: What of the package is above that layer.
_ABOVE = {"__main__", "autograd", "distributed", "model", "nn", "ops", "plan"}


def _tracer() -> Any:
    """Return what takes the coverage, or None."""
    return import_module("coverage").Coverage.current() if "pytest_cov" in sys.modules else None


@contextmanager
def _untraced() -> Iterator[None]:
    """Take no coverage meanwhile: stop both tracers that a worker has, one below the other."""
    tracers = []
    while (tracer := _tracer()) is not None:
        tracer.stop()
        tracers.append(tracer)
    try:
        yield
    finally:
        for tracer in reversed(tracers):
            tracer.start()


def _import_format_layer() -> None:
    """Import the modules of the format layer, so that a tracer sees what they define."""
    package = import_module("sparsefmt")
    for top in iter_modules(package.__path__, "sparsefmt."):
        if top.name.removeprefix("sparsefmt.") not in _ABOVE:
            module = import_module(top.name)
            for inner in iter_modules(getattr(module, "__path__", ()), f"{top.name}."):
                import_module(inner.name)


def _share_compiling(config: pytest.Config) -> None:
    """Have two workers compile different modules first, where no module is compiled yet.

    Each finds what the other one has compiled: libraries, and tests with their assertions.
    """
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    [*import_module("sparsefmt.ops.engine.table").operations()]  # tests are in their order
    if worker != "gw1":
        with suppress(ImportError):
            import_module("torch_geometric.nn")
        return
    folders = sorted((p.parent for p in ROOT.glob("tests/*/test_*.py")), reverse=True)
    folders.sort(key=lambda folder: folder.name not in _COMPILED | {"formats", "io", "mutants"})
    config.args = [str(folder) for folder in dict.fromkeys(folders)]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Trace no collection, which takes twice as long under a tracer."""
    if _tracer() is not None and not session.config.getoption("numprocesses", 0):
        _import_format_layer()
    with _untraced():
        _share_compiling(session.config)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace only the tests that cover the format layer."""
    with nullcontext() if item.path.parent.name in _COVERING else _untraced():
        return (yield)


def pytest_collection_finish() -> None:
    """Let the garbage collector walk what tests make, not what modules hold."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and why_no_gpu():
        pytest.skip(why_no_gpu())


@pytest.fixture(scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """The array module under test; a test that takes it runs once for each device."""
    return import_module(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where torch's tensors are; a test that takes it runs once for each."""
    return str(request.param)


#: Rooms of operations, whose tests are of the loops that numba compiles.
_COMPILED = {"attention", "cbsr", "edges", "engine", "gcn", "laws", "matmul", "sampling", "tiles"}


@pytest.fixture(autouse=True)
def compiled_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the compiled loops however small the graphs are, but in tests that take ``small_work``.

    In the rooms of operations alone: elsewhere, as for users, sizes decide.  They decide too for
    float64 and int64 where the grid is left out, in rooms whose operations have loops of NumPy and
    SciPy: to compile each loop four times takes minutes.
    """
    sizes_decide = (
        request.path.parent.name in {"attention", "edges", "laws", "matmul"}
        and "not grid" in request.config.getoption("markexpr")
        and hasattr(request.node, "callspec")
        and _rare(request.node.callspec.params)
    )
    if _is_compiled(request.node) and not sizes_decide:
        small = import_module("sparsefmt.ops.engine.small")
        monkeypatch.setattr(small, "MOST", -1)
        monkeypatch.setattr(small, "MOST_OF_ATTENTION", -1)


@pytest.fixture(scope="session", autouse=True)
def rare_loops(request: pytest.FixtureRequest) -> None:
    """Compile loops as for users for float32 and int32 alone where the grid is left out."""
    if "not grid" in request.config.getoption("markexpr"):
        import_module("rare_loops").install()


@pytest.fixture
def small_work() -> None:
    """Let sizes decide between compiled loops and those of NumPy and SciPy, as for users."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For thousands of tiny calls: waking other threads would take most of the time."""
    numba = pytest.importorskip("numba")
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch's deterministic mode, in which nothing adds up by atomics."""
    torch = pytest.importorskip("torch")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rounds_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round rows to bfloat16 where that is allowed, however few gathers or features there are."""
    cuda = import_module("sparsefmt.ops.matmul.cuda")
    monkeypatch.setattr(cuda, "LEAST_GATHERS", 0)
    monkeypatch.setattr(cuda, "LEAST_FEATURES", 0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs: ``$SPARSEFMT_DATA``, else ``../shared/data`` of the checkout."""
    folder = Path(os.environ.get("SPARSEFMT_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real graphs at {folder}: set SPARSEFMT_DATA")
    return folder
