"""Caches of modules are in one registry, which ``sparsefmt.clear_caches`` empties."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    path.relative_to(ROOT / "sparsefmt").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "sparsefmt").rglob("*.py"))
}
#: Containers of modules that are no caches, and why they may not be emptied.
OTHERS = {
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


def is_empty_container(value: ast.expr) -> bool:
    """Return True for ``{}``, ``[]``, ``set()``, ``WeakKeyDictionary()`` and the like."""
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id=name), args=[]):
            return name.endswith(("dict", "set", "Dict", "Set", "Dictionary", "list", "Cache"))
    return False


def test_functions_are_cached_by_the_registry():
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in SOURCES.items()
        if name != "_caches.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == "functools"
        and {"cache", "lru_cache"} & {alias.name for alias in node.names}
    ]
    assert not wrong, f"import them from _caches: {wrong}"


def test_containers_of_modules_are_in_the_registry():
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in SOURCES.items()
        if name not in OTHERS
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and is_empty_container(node.value)
    ]
    assert not wrong, f"write _caches.store(...), or say in OTHERS why not: {wrong}"
