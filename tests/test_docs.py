"""Every block of Python in the two pages about operations and training runs, on the CPU."""

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


def run(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the blocks of a page in order; an error names the line of the page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    # torch.compile imports the module that a function names as its own.
    module = ModuleType(page.replace(".", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert blocks, f"{page} has no block of Python"
    for block in blocks:
        above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * above + block[1], str(DOCS / page), "exec"), vars(module))
    return vars(module)


def test_the_page_on_operations_runs(monkeypatch, capsys):
    run("operations.md", monkeypatch)
    said, page = capsys.readouterr().out, (DOCS / "operations.md").read_text(encoding="utf-8")
    assert f"# {said.splitlines()[0]}\n" in page


# torch's tracer itself instantiates the class that it warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_page_on_training_runs(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # The default backend needs a C++ compiler; this one traces just the same.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    names = run("training.md", monkeypatch)
    torch._dynamo.reset()
    assert names["loss"].isfinite()
    assert all(p.grad.isfinite().all() for p in names["model"].parameters())
