"""Run tests in a forked child in which one module of the library is another one.

The parent has imported what the library needs, and never the library itself: a child begins with
that in half a second.
"""

import ast
import importlib.util
import os
import pickle
import resource
import signal
import sys
import traceback
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sparsefmt"
#: Slow imports of the library and its tests.
NEEDED = (
    "numpy", "scipy.io", "scipy.sparse", "scipy.sparse.csgraph", "numba", "ml_dtypes", "networkx",
    "torch", "torch_geometric", "hypothesis.stateful", "hypothesis.extra.numpy",
)  # fmt: skip
#: Bytes that a child may allocate beyond its parent's.  Address space is not limited: readers look
#: at that limit.
MEMORY = 4 * 2**30
#: Seconds for importing and collecting; and for a test, beside ten times what it takes otherwise.
PATIENCE = 60
SLACK = 10


def replace(file: Path, tree: ast.Module) -> None:
    """Import a module from another tree than that of its file; nothing is cached."""
    get_code = SourceFileLoader.get_code

    def code_of(loader: SourceFileLoader, name: str) -> CodeType:
        if loader.path != str(file):
            return get_code(loader, name)
        with warnings.catch_warnings(action="ignore"):
            return compile(tree, loader.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = code_of


class Plugin:
    """Run the chosen tests in their order, each for a limited time, and note what happens."""

    def __init__(self, note: Path, chosen: dict[str, float] | None, coverage: object) -> None:
        self.note, self.chosen, self.coverage = note, chosen, coverage
        self.seconds: dict[str, float] = {}
        self.failed = ""

    def pytest_sessionstart(self) -> None:
        """Let hypothesis look for a failure, and shrink it for a few seconds only."""
        from hypothesis import HealthCheck, Phase, settings
        from hypothesis.internal.conjecture import engine

        engine.MAX_SHRINKING_SECONDS = SLACK / 2
        phases = [Phase.explicit, Phase.generate, Phase.shrink]
        slow = [HealthCheck.too_slow]
        settings.register_profile(
            "mutants", settings.get_profile("ci"), phases=phases, suppress_health_check=slow
        )
        settings.load_profile("mutants")
        if (Path.cwd() / "sparsefmt").is_dir():  # what hypothesis does where it has its plug-ins
            from sparsefmt.testing.plugin import register

            register()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests, in the order in which they were chosen."""
        if self.chosen is not None:
            order = {test: place for place, test in enumerate(self.chosen)}
            items[:] = [item for item in items if item.nodeid in order]
            items.sort(key=lambda item: order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        """Limit a test's time, and say whose lines are run."""
        usual = (self.chosen or {}).get(item.nodeid, PATIENCE)
        signal.setitimer(signal.ITIMER_REAL, SLACK + 10 * usual)
        if self.coverage:
            self.coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up a test's seconds, and keep the first that fails."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the first file that cannot be imported."""
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} (import)"

    def pytest_sessionfinish(self) -> None:
        """Write down what happened."""
        lines = {}
        if self.coverage:
            self.coverage.stop()
            data = self.coverage.get_data()
            lines = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        note = {"failed": self.failed, "seconds": self.seconds, "lines": lines}
        self.note.write_bytes(pickle.dumps(note))


def prepare() -> None:
    """Import in this process what children need, so that they begin with it."""
    for pool in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ[f"{pool}_NUM_THREADS"] = "1"
    os.environ.update(HYPOTHESIS_NO_PLUGINS="1", SPARSEFMT_EXAMPLES="30", MPLBACKEND="Agg")
    with warnings.catch_warnings(action="ignore"):
        for name in NEEDED:
            if importlib.util.find_spec(name.partition(".")[0]):
                importlib.import_module(name)
    del os.environ["HYPOTHESIS_NO_PLUGINS"]  # children, and what they start, are as usual again
    assert not any(name.partition(".")[0] == "sparsefmt" for name in sys.modules)


def start(
    tests: list[str], folder: Path, *, changed: tuple[Path, ast.Module] | None = None,
    chosen: dict[str, float] | None = None, lines_of: list[Path] | None = None,
    root: Path = ROOT, memory: int = MEMORY,
) -> int:  # fmt: skip
    """Fork a child that runs tests in its own folder and writes ``folder/note``; give its number.

    It imports ``changed``, a file and its mutated tree; runs the tests of ``chosen`` alone, with
    their usual seconds, in that order; and notes which test runs which line of ``lines_of``.
    """
    folder.mkdir(parents=True)
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(root)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        code = child_code(tests, folder, changed, chosen, lines_of)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def child_code(
    tests: list[str], folder: Path, changed: tuple[Path, ast.Module] | None,
    chosen: dict[str, float] | None, lines_of: list[Path] | None,
) -> int:  # fmt: skip
    """Run pytest in this process, which is a child."""
    coverage = None
    if lines_of:
        from coverage import Coverage

        watched = [str(path) for path in lines_of]
        coverage = Coverage(data_file=None, config_file=False, include=watched, messages=False)
        coverage.start()
    if changed:
        replace(*changed)
        if "numba" in sys.modules:  # what it compiles beside mutants stays out of its cache
            sys.modules["numba.core.caching"].Cache.save_overload = lambda *_: None
    plugin = Plugin(folder / "note", chosen, coverage)
    options = ["-x", "-q", "--no-header", "-m", "not gpu and not grid", "-p", "no:cacheprovider"]
    options += ["-p", "no:xdist", "-p", "no:pytest_cov", "--assert=plain", "--tb=short"]
    options += [f"--basetemp={folder / 'tmp'}"]
    return int(pytest.main([*options, *tests], plugins=[plugin]))
