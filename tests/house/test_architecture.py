"""House rules that neither ruff nor import-linter checks: sizes, names, words, what imports load.

``pyproject.toml`` has the others: who imports whom, what is caught, how many arguments there are.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sparsefmt"
MAX_LINES = 500
MAX_BODY = 60
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
SOURCES = sorted(PACKAGE.rglob("*.py"))
KERNELS = sorted([*PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.cuh")])
#: First lines of docstrings begin with a plain verb, none of these.
NO_VERB = re.compile(r"(Give|Tell|Say|Whether|What|How|Where|Which|Of|Those|That|The|A|An)\b|\(")
#: They name no object: say ``result``, ``args``, ``cached``, ``direct`` or what it holds.
NO_NAMES = set(
    "found given held kept way beside away once at_once here other others one how usual whole "
    "bare plain heard watched".split()
)
#: Python's own word for the other side of ``==``, and a documented field of a candidate.
NAMES = {("base.py", "other"), ("planner.py", "once")}
#: Functions whose first line is the formula that they compute, of an entry or a row.
FORMULAS = 26
#: Files with containers that are no caches, and why they may not be emptied.
NO_CACHES = {
    "_caches.py": "the registry itself",
    "autograd/tensors/reports.py": "memory that a kernel may still write to",
    "graph/built.py": "registered by storeys above",
    "model/composition.py": "numbers of living graphs, beside a store that is registered",
    "model/layers.py": "what belongs to living graphs",
    "ops/engine/bind.py": "registered by the torch layer",
    "ops/engine/call.py": "registered by the torch layer",
    "ops/engine/explain.py": "registered by the torch layer",
    "ops/engine/jit.py": "loaded kernels, which CUDA graphs may launch",
    "ops/engine/memory.py": "registered by the torch layer",
    "ops/engine/structure.py": "where living structures are",
    "ops/engine/table.py": "the rows",
    "ops/tiles/operands.py": "which living structures have tiles",
}


class Import(NamedTuple):
    """One imported name."""

    target: str  #: absolute dotted name, ``sparsefmt.ops.matmul.spmm`` or ``numpy``
    line: int
    typing_only: bool  #: under ``if TYPE_CHECKING``: never executed


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """``sparsefmt/ops/__init__.py`` -> ``sparsefmt.ops``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[Import]:
    """Yield every import of the file, at module level and in functions."""
    package = path.relative_to(ROOT).parent.parts
    blocks = [
        node
        for node in ast.walk(parse(path))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    ]
    guarded = {inner for block in blocks for one in block.body for inner in ast.walk(one)}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, node in guarded)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function of the package, and where it is."""
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, FUNCTION):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def is_empty_container(value: ast.expr | None) -> bool:
    """Return True for ``{}``, ``[]``, ``set()``, ``WeakKeyDictionary()`` and the like."""
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id=name), args=[]):
            return name.endswith(("dict", "set", "Dict", "Set", "Dictionary", "list", "Cache"))
    return False


def in_subprocess(code: str, *arguments: str) -> list[str]:
    """Return the words that ``code`` prints in a fresh interpreter in the root of the checkout."""
    command = [sys.executable, "-c", f"import sys, time, importlib\n{code}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_files_fit():
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in [*SOURCES, *KERNELS]}
    assert PACKAGE / "formats" / "base.py" in lines
    assert {str(path): count for path, count in lines.items() if count > MAX_LINES} == {}


def test_function_bodies_fit():
    assert [name for name, function in functions() if body_lines(function) > MAX_BODY] == []


def test_names_that_begin_with_an_underscore_stay_in_their_package():
    wrong = []
    for path in SOURCES:
        for target, line, _ in imports(path):
            package, _, name = target.rpartition(".")
            submodule = ROOT.joinpath(*target.split(".")).with_suffix(".py").is_file()
            if name.startswith("_") and not name.startswith("__") and not submodule:
                home = ".".join(path.relative_to(ROOT).parent.parts)
                if package.startswith("sparsefmt.") and not package.startswith(home):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} {target}")
    assert not wrong


def test_file_names_say_a_subject():
    vague = {"utils", "util", "helpers", "helper", "misc", "common_utils"}
    files = [*KERNELS, *(path for name in ("sparsefmt", "tests", "benchmarks", "docs")
                         for path in (ROOT / name).rglob("*.py"))]  # fmt: skip
    assert not [path for path in files if path.stem.strip("_") in vague]


def test_first_lines_begin_with_a_verb():
    lines = {name: (ast.get_docstring(function) or "") for name, function in functions()}
    wrong = [
        f"{name}: {line.splitlines()[0]}" for name, line in lines.items() if NO_VERB.match(line)
    ]
    assert not wrong
    assert sum(line.startswith("``") for line in lines.values()) <= FORMULAS


def name_of(node: ast.AST) -> str:
    """Return the name that a node binds: a function's, a parameter's, a variable's or a field's."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return ""


def test_names_say_what_they_hold():
    wrong = {
        (path.name, name)
        for path in SOURCES
        for node in ast.walk(parse(path))
        if (name := name_of(node)).strip("_") in NO_NAMES
    }
    assert wrong == NAMES


def test_caches_of_modules_are_in_the_registry():
    """``sparsefmt.clear_caches`` empties it."""
    wrong = []
    for path in SOURCES:
        name = path.relative_to(PACKAGE).as_posix()
        if name != "_caches.py" and {one.target for one in imports(path)} & {
            "functools.cache",
            "functools.lru_cache",
        }:
            wrong.append(f"{name}: import cache and lru_cache from _caches")
        for node in parse(path).body if name not in NO_CACHES else ():
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_empty_container(node.value):
                wrong.append(f"{name}:{node.lineno}: write _caches.store(...), or say why not")
    assert not wrong


def test_no_module_has_the_name_of_a_function_that_its_package_exports():
    """``sparsefmt.convert`` would be the function or the module, by the order of imports."""
    clashes = []
    for path in SOURCES:
        if path.name == "__init__.py":
            package = import_module(module_name(path))
            for name in getattr(package, "__all__", ()):
                if (path.with_name(name).is_dir() or path.with_name(f"{name}.py").is_file()) and (
                    not isinstance(getattr(package, name), ModuleType)
                ):
                    clashes.append(f"{package.__name__}.{name}")
    assert not clashes


def test_import_loads_no_accelerator_library_and_no_compiler():
    modules = "sparsefmt", "sparsefmt.ops", "sparsefmt.autograd", "sparsefmt.nn"
    code = """
for name in sys.argv[1:]: importlib.import_module(name)
print(*{"cupy", "torch", "numba", "hypothesis", "matplotlib"} & set(sys.modules))
"""
    assert in_subprocess(code, *modules) == []


def test_import_is_quick():
    code = "start = time.perf_counter(); import sparsefmt; print(time.perf_counter() - start)"
    best = min(float(in_subprocess(code)[0]) for _ in range(5))
    assert best < 0.150, f"import sparsefmt took {best * 1000:.0f} ms, the best of 5"


def test_storeys_below_autograd_load_neither_torch_nor_cupy():
    """A user may have none of them; import-linter cannot see that functions import CuPy."""
    above = re.compile(r"sparsefmt\.(__main__|autograd|model|nn|distributed(?!\.parts))")
    modules = [name for path in SOURCES if not above.match(name := module_name(path))]
    code = """
for name in sys.argv[1:]: importlib.import_module(name)
print(*{"cupy", "cupyx", "torch"} & set(sys.modules))
"""
    assert in_subprocess(code, *modules) == []


@pytest.mark.parametrize("layer", ["ops", "autograd"])
def test_root_link_is_relative_and_shows_its_layer(layer):
    link = ROOT / layer
    if not link.is_symlink():
        pytest.skip("this checkout has no symlinks, and needs none")
    assert str(link.readlink()) == f"sparsefmt/{layer}"


def test_launchers_hold_the_memory_whose_address_they_pass_on():
    """An array that only its pointer outlives goes back to its pool before the launch."""
    gone = re.compile(r"\.pointers?\(\s*m\.(empty|zeros|contiguous|rows_in_place|factors)\b")
    assert not [path.name for path in PACKAGE.rglob("cuda*.py") if gone.search(path.read_text())]
