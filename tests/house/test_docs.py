"""Every code block of README, CONTRIBUTING and docs runs, or says beside itself what it needs.

A block begins with a line such as ```` ```python needs=gpu ````:

- ``python`` runs here: the blocks of a page in order, in one namespace and a temporary folder;
- ``sh`` holds commands of ``sparsefmt`` alone, which run in the same folder;
- ``text`` is not code;
- ``needs=gpu``, ``needs=torch`` and ``needs=checkout`` say what a block needs; a sentence near by
  says it to readers.  Where it is not there, a block of Python must compile all the same;
- ``from=PATH``: the block stands word for word in that file, which is a test.
"""

import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
#: What a block may need -> words of which a sentence near by must have one.
NEEDS = {"gpu": ("GPU",), "torch": ("torch", "PyTorch"), "checkout": ("checkout", "clone")}
LANGUAGES = {"python", "sh", "text"}


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    line: int  #: of its first line of code
    language: str
    options: dict[str, str]
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    found, text = [], text_of(page)
    for fence in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        language, *options = fence[1].split() or [""]
        line = text.count("\n", 0, fence.start(2)) + 1
        named = dict(option.split("=", 1) for option in options)
        found.append(Block(page, line, language, named, fence[2]))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
WITH_PYTHON = [page for page in PAGES if any(b.language == "python" for b in blocks(page))]


def run(page: str, monkeypatch: pytest.MonkeyPatch, *here: str) -> dict[str, Any]:
    """Run the blocks of a page in order, those that need no more than is ``here``."""
    # torch.compile imports the module that a function names as its own.
    module = ModuleType(re.sub(r"\W", "_", page))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if "from" in block.options or block.language == "text":
            continue
        runs = block.options.get("needs", "") in ("", *here)
        if block.language == "sh" and runs:
            run_commands(block)
        elif block.language == "python":
            # An error names the line of the page.
            code = compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec")
            if runs:
                exec(code, vars(module))
    return vars(module)


def run_commands(block: Block) -> None:
    from sparsefmt.cli import main

    for line in block.code.splitlines():
        command, *arguments = shlex.split(line, comments=True)
        assert command == "sparsefmt", f"{block}: only commands of sparsefmt run here"
        assert main(arguments) == 0, f"{block}: {line}"


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_says_what_it_is_and_what_it_needs(block):
    assert block.language in LANGUAGES, f"{block} is {block.language!r}"
    assert set(block.options) <= {"needs", "from"}
    if "from" in block.options:
        source = (ROOT / block.options["from"]).read_text(encoding="utf-8")
        assert block.code in source, f"{block} differs from {block.options['from']}"
    if "needs" in block.options:
        lines = text_of(block.page).splitlines()
        end = block.line + block.code.count("\n")
        beside = "\n".join([*lines[:6], *lines[max(block.line - 6, 0) : end + 3]])
        assert any(word in beside for word in NEEDS[block.options["needs"]]), (
            f"{block} does not say it"
        )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Those to files of this repository."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`]*`", "", text_of(page)))
    here = (ROOT / page).parent
    missing = [link for link in links if "://" not in link and not (here / link).exists()]
    assert not missing


@pytest.fixture
def here(monkeypatch):
    """Return what there is for blocks on the CPU: torch, which then sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # The default backend needs a C++ compiler; this one traces just the same.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield ("torch",)
    torch._dynamo.reset()


# torch's tracer itself instantiates the class that it warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_blocks_of_a_page_run(page, monkeypatch, tmp_path, here, capsys):
    monkeypatch.chdir(tmp_path)
    names = run(page, monkeypatch, *here)
    for name, function in names.items():
        if name.startswith("test_"):
            function()
    if page in CHECKS:
        CHECKS[page](names, capsys.readouterr().out)


def check_operations(_: dict[str, Any], said: str) -> None:
    """The page shows what ``explain`` says."""
    assert f"# {said.splitlines()[0]}\n" in text_of("docs/operations.md")


def check_training(names: dict[str, Any], _: str) -> None:
    assert names["loss"].isfinite()
    assert all(p.grad.isfinite().all() for p in names["model"].parameters())


CHECKS = {"docs/operations.md": check_operations, "docs/training.md": check_training}


@pytest.mark.gpu
@pytest.mark.parametrize("page", sorted({b.page for b in ALL if b.options.get("needs") == "gpu"}))
def test_the_blocks_of_a_page_run_on_a_gpu(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run(page, monkeypatch, "gpu")


def test_the_drawing_shows_the_rooms_that_there_are():
    script = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
    drawn = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert script["draw"]() == drawn, "draw it again: python docs/architecture.py"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    """From the root, or from the package: ``ops/matmul/cuda.py``."""
    named = re.findall(r"`(\w+/[\w/]+\.(?:py|cu|cuh|md))\b", text_of(page))
    folders = ROOT, ROOT / "sparsefmt", ROOT / "sparsefmt" / "ops"
    assert not [name for name in named if not any((folder / name).exists() for folder in folders)]
