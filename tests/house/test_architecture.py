"""The house rules that a parser can check: who imports whom, sizes, names, what is caught.

Nothing here imports the library, except in subprocesses that measure what importing it does.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sparsefmt"

# A storey imports itself and those to its left. TOOLS stand beside: they use these up to plan.
LAYERS = ("formats", "ops", "plan", "autograd", "model", "nn", "distributed")
TOOLS = {"cli", "__main__", "plot", "testing"}
MAY_IMPORT = {layer: set(LAYERS[: i + 1]) for i, layer in enumerate(LAYERS)}
MAY_IMPORT["tools"] = {"formats", "ops", "plan", "tools"}

MAX_LINES = 500
MAX_BODY = 60
MAX_ARGUMENTS = 12
#: Constructors that take what PyG's do, one by one.
OF_PYG = ("sparsefmt.nn.gat.__init__",)
#: What rooms of ``ops`` take of one another, beside ``engine`` and ``matmul``.
NEIGHBOURS = {
    "matmul": {"tiles"},
    "edges": {"cbsr", "tiles"},
    "attention": {"edges"},
    "cbsr": {"tiles"},
    "tiles": {"cbsr", "edges"},
}

CATCHES_ALL = {"Exception", "BaseException"}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

SOURCES = sorted(PACKAGE.rglob("*.py"))
KERNELS = sorted([*PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.cuh")])
HOUSE = [
    path
    for folder in ("sparsefmt", "tests", "benchmarks", "examples", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


class Import(NamedTuple):
    """One imported name, and where it is imported."""

    target: str  #: absolute dotted name, ``sparsefmt.ops.matmul.spmm`` or ``numpy``
    line: int
    scope: tuple[str, ...]  #: names of the enclosing classes and functions
    deferred: bool  #: inside a function: executed when that is called
    typing_only: bool  #: under ``if TYPE_CHECKING``: never executed


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """``sparsefmt/ops/__init__.py`` -> ``sparsefmt.ops``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> list[str]:
    return list(path.relative_to(ROOT).parent.parts)


def absolute(path: Path, module: str | None, level: int) -> str:
    """The dotted name that ``from <level dots><module>`` means in ``path``."""
    if level == 0:
        return module or ""
    package = package_of(path)
    return ".".join([*package[: len(package) - level + 1], *([module] if module else [])])


def targets(path: Path, node: ast.AST) -> list[str]:
    """What ``node`` imports; ``import_module("...")`` with a literal counts too."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, level=level, names=names):
            base = absolute(path, module, level)
            return [f"{base}.{alias.name}" for alias in names]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            level = len(name) - len(name.lstrip("."))
            return [absolute(path, name.lstrip(".") or None, level)]
    return []


def imports(path: Path) -> Iterator[Import]:
    """Every import of the file, at module level and in functions."""

    def visit(
        node: ast.AST, scope: tuple[str, ...], deferred: bool, typing_only: bool
    ) -> Iterator[Import]:
        for target in targets(path, node):
            yield Import(target, node.lineno, scope, deferred, typing_only)
        if isinstance(node, ast.ClassDef | FUNCTION):
            scope = (*scope, node.name)
        deferred = deferred or isinstance(node, FUNCTION)
        guarded = node.body if isinstance(node, ast.If) and is_type_checking(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope, deferred, typing_only or child in guarded)

    yield from visit(parse(path), (), False, False)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def layer_of(dotted: str) -> str:
    """The layer of a ``sparsefmt...`` name."""
    first = [*dotted.split("."), ""][1]
    if first in LAYERS:
        return first
    return "tools" if first in TOOLS else "formats"


def is_submodule(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def body_lines(function: FUNCTION) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def in_subprocess(code: str, *arguments: str) -> str:
    """What ``code`` prints in a fresh interpreter that stands in the root of the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sources_were_found():
    assert PACKAGE / "formats" / "base.py" in SOURCES


def test_imports_run_one_way_only():
    wrong = [
        f"{where(path, found.line)} imports {found.target}"
        for path in SOURCES
        for found in imports(path)
        if found.target.split(".")[0] == "sparsefmt"
        and layer_of(found.target) not in MAY_IMPORT[layer_of(module_name(path))]
        # The façade names public objects of every layer for type checkers; it runs none of them.
        and not (path == PACKAGE / "__init__.py" and found.typing_only)
        # `A @ X`: a format reaches up when called.
        and not (
            path == PACKAGE / "formats" / "base.py"
            and found.scope == ("Format", "__matmul__")
            and found.target.startswith("sparsefmt.ops.matmul")
        )
        # `sparsefmt partition`: folders of parts, which are written without torch.
        and not (
            path == PACKAGE / "cli" / "planning.py"
            and found.target.startswith("sparsefmt.distributed.parts.")
        )
        # `SGT.split`: tiles for tensor cores are cut by the room that reads them.
        and not (
            path == PACKAGE / "formats" / "sgt.py"
            and (found.scope == ("SGT", "split") or found.typing_only)
            and found.target.startswith("sparsefmt.ops.tiles")
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_import_from_the_module_that_defines():
    """Through the façade, a lower layer could reach a higher one unseen."""
    wrong = [
        f"{where(path, found.line)} imports {found.target}"
        for path in SOURCES
        if layer_of(module_name(path)) != "tools" and path != PACKAGE / "__init__.py"
        for found in imports(path)
        if found.target == "sparsefmt"
        or (
            found.target.startswith("sparsefmt.")
            and found.target.count(".") == 1
            and not is_submodule(found.target)
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_formats_load_no_optional_library():
    """torch in functions of interop only; CuPy in functions, since a user may not have it."""
    wrong = []
    for path in SOURCES:
        if layer_of(module_name(path)) != "formats":
            continue
        for found in imports(path):
            library = found.target.split(".")[0]
            if library not in {"torch", "cupy", "cupyx"} or found.typing_only:
                continue
            if not found.deferred or (
                library == "torch" and path != PACKAGE / "interop" / "torch.py"
            ):
                wrong.append(f"{where(path, found.line)} imports {found.target}")
    assert not wrong, "\n".join(wrong)


def test_parts_of_graphs_are_written_without_torch():
    wrong = [
        f"{where(path, found.line)} imports {found.target}"
        for path in (PACKAGE / "distributed" / "parts").glob("*.py")
        for found in imports(path)
        if found.target.split(".")[0] == "torch"
        or "autograd" in found.target
        or (
            found.target.startswith("sparsefmt.distributed.")
            and not found.target.startswith("sparsefmt.distributed.parts.")
        )
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layer", ["ops", "plan"])
def test_torch_stays_out_of(layer):
    wrong = [
        f"{where(path, found.line)} imports {found.target}"
        for path in SOURCES
        if layer_of(module_name(path)) == layer
        for found in imports(path)
        if found.target.split(".")[0] == "torch" and not found.typing_only
    ]
    assert not wrong, "\n".join(wrong)


def test_layers_are_written_with_modules_of_autograd():
    """A user can write the same: layers reach graphs and operations through ``autograd`` alone.

    They import from the modules that define: ``sparsefmt.autograd`` exports what users call.
    """
    house = ("_lazy", "autograd", "errors", "model", "nn")
    wrong = [
        f"{where(path, found.line)} imports {found.target}"
        for path in SOURCES
        if layer_of(module_name(path)) == "nn"
        for found in imports(path)
        if found.target.split(".")[0] == "sparsefmt" and found.target.split(".")[1] not in house
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_through_the_root_links():
    wrong = [
        f"{where(path, found.line)} imports {found.target}"
        for path in HOUSE
        for found in imports(path)
        if found.target.split(".")[0] in {"ops", "autograd"}
    ]
    assert not wrong, "\n".join(wrong)


def test_hypothesis_is_imported_only_by_testing():
    wrong = [
        f"{where(path, found.line)} imports {found.target}"
        for path in SOURCES
        if path.parent != PACKAGE / "testing"
        for found in imports(path)
        if found.target.split(".")[0] == "hypothesis"
    ]
    assert not wrong, "\n".join(wrong)


def test_files_fit():
    lines = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in [*SOURCES, *KERNELS]
    }
    long = [f"{path}: {count} lines" for path, count in lines.items() if count > MAX_LINES]
    assert not long, f"over {MAX_LINES} lines, split by subject:\n" + "\n".join(long)


def test_function_bodies_fit():
    long = [
        f"{where(path, function.lineno)} {function.name}: {body_lines(function)} lines"
        for path in SOURCES
        for function in ast.walk(parse(path))
        if isinstance(function, FUNCTION) and body_lines(function) > MAX_BODY
    ]
    assert not long, "\n".join(long)


def is_compiled(function: FUNCTION) -> bool:
    """Whether a decorator makes a kernel of it, which takes all that it reads."""
    compiled = {"inlined", "parallel", "operation", "serial"}
    return any(ast.unparse(one).split("(")[0] in compiled for one in function.decorator_list)


def test_arguments_are_few_outside_kernels():
    """What prepares launches takes an operation's arguments one by one, as kernels do."""
    found = []
    for path in SOURCES:
        for function in (node for node in ast.walk(parse(path)) if isinstance(node, FUNCTION)):
            given = function.args
            count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
            if f"{module_name(path)}.{function.name}" in OF_PYG:
                continue
            prepares = function.name.startswith("_prepare") and "/ops/" in path.as_posix()
            if count > MAX_ARGUMENTS and not is_compiled(function) and not prepares:
                found.append(f"{where(path, function.lineno)} {function.name}: {count}")
    assert not found, "\n".join(found)


def test_names_that_begin_with_an_underscore_stay_in_their_package():
    found = []
    for path in SOURCES:
        home = ".".join(package_of(path))
        for one in imports(path):
            package, _, name = one.target.rpartition(".")
            private = name.startswith("_") and not name.startswith("__")
            if private and package.startswith("sparsefmt.") and not is_submodule(one.target):
                if not package.startswith(home):
                    found.append(f"{where(path, one.line)} {one.target}")
    assert not found, "\n".join(found)


def test_rooms_take_little_of_one_another():
    rooms = {path.name for path in (PACKAGE / "ops").iterdir() if path.is_dir()}
    found = []
    for path in (PACKAGE / "ops").rglob("*.py"):
        room = path.relative_to(PACKAGE / "ops").parts[0]
        if room not in rooms - {"engine"}:
            continue
        for one in imports(path):
            parts = one.target.split(".")
            other = parts[2] if parts[:2] == ["sparsefmt", "ops"] and len(parts) > 2 else room
            if other in rooms - {room, "engine", "matmul"} - NEIGHBOURS.get(room, set()):
                found.append(f"{where(path, one.line)} {one.target}")
    assert not found, "\n".join(found)


def test_file_names_say_a_subject():
    vague = {"utils", "util", "helpers", "helper", "misc", "common_utils"}
    assert not [path for path in [*HOUSE, *KERNELS] if path.stem.strip("_") in vague]


def test_no_handler_catches_everything():
    wrong = []
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if any(one is None or ast.unparse(one) in CATCHES_ALL for one in caught):
                    wrong.append(where(path, node.lineno))
    assert not wrong, "\n".join(wrong)


def test_no_module_has_the_name_of_a_function_that_its_package_exports():
    """``sparsefmt.convert`` would be the function or the module, by the order of imports."""
    packages = sorted(path.parent for path in SOURCES if path.name == "__init__.py")
    names = [module_name(package / "__init__.py") for package in packages]
    code = """
import importlib, json, sys
packages = [importlib.import_module(name) for name in sys.argv[1:]]
print(json.dumps({one.__name__: list(getattr(one, "__all__", [])) for one in packages}))
"""
    exported = json.loads(in_subprocess(code, *names))
    clashes = []
    for package, name in zip(packages, names, strict=True):
        modules = {path.stem for path in package.glob("*.py")} | {
            path.name for path in package.iterdir() if (path / "__init__.py").is_file()
        }
        defined = {
            node.name
            for path in package.rglob("*.py")
            for node in parse(path).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        clashes += [f"{name}.{one}" for one in modules & defined & set(exported[name])]
    assert not clashes, clashes


def test_import_loads_no_accelerator_library_and_no_compiler():
    code = (
        "import sys, sparsefmt, sparsefmt.ops, sparsefmt.autograd, sparsefmt.nn\n"
        "print(*sorted({'cupy', 'torch', 'numba', 'hypothesis', 'matplotlib'} & set(sys.modules)))"
    )
    assert in_subprocess(code).split() == []


def test_import_is_quick():
    code = (
        "import time\nstart = time.perf_counter()\nimport sparsefmt\n"
        "print(time.perf_counter() - start)"
    )
    best = min(float(in_subprocess(code)) for _ in range(5))
    assert best < 0.150, f"import sparsefmt took {best * 1000:.0f} ms, the best of 5"


def test_every_module_imports_without_the_root_links():
    """The links are importable from the root of a checkout; no module of the library does it."""
    modules = [module_name(path) for path in SOURCES if path.name != "__main__.py"]
    code = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("ops", "autograd"):
            raise AssertionError(f"something imported the root link {name}")
sys.meta_path.insert(0, Refuse())
for module in sys.argv[1:]:
    importlib.import_module(module)
"""
    in_subprocess(code, *modules)


@pytest.mark.parametrize("layer", ["ops", "autograd"])
def test_root_link_is_relative_and_shows_its_layer(layer):
    link = ROOT / layer
    if not link.is_symlink():
        pytest.skip("this checkout has no symlinks, and needs none")
    assert str(link.readlink()) == f"sparsefmt/{layer}"


def test_launchers_hold_the_memory_whose_address_they_pass_on():
    """An array that only its pointer outlives goes back to its pool before the launch."""
    gone = re.compile(r"\.pointers?\(\s*m\.(empty|zeros|contiguous|rows_in_place|factors)\b")
    found = [path.name for path in PACKAGE.rglob("cuda*.py") if gone.search(path.read_text())]
    assert not found
