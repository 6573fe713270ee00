"""The mutants are the changes that they say, and a test that fails kills one."""

import ast
import importlib.util
import os
import pickle
import signal
import sys
from pathlib import Path

import mutations
import pytest
import trial

TOY = '''
"""Text."""
import numpy as np

def middle(low: int = 0, high: int = 4, *, round=False):
    """Text."""
    if low > high and not round:
        raise ValueError(f"{low + 1}")
    if is_cupy(low):
        return cupy.mean(1 + 2)
    high += low
    return (low + high) // 2

def elementwise(a):
    def kernel():
        return a + 4
    return kernel

def host(a):
    if not is_cupy(a):
        return a[1:]
    import cupy
    return a + 3
'''


@pytest.fixture(scope="module")
def runner():
    """``run.py``, under a name of its own: other folders have a ``run`` too."""
    file = Path(trial.__file__).with_name("run.py")
    spec = importlib.util.spec_from_file_location("run_mutants", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks for it
    spec.loader.exec_module(module)
    return module


def test_mutants_are_single_changes_of_code_for_a_cpu():
    said = {mutant.after for mutant in mutations.mutants("toy.py", TOY)}
    assert said == {
        "def middle(low: int=1, high: int=4, *, round=False):",
        "def middle(low: int=0, high: int=5, *, round=False):",
        "def middle(low: int=0, high: int=4, *, round=True):",
        "if low >= high and (not round):",
        "if low > high or not round:",
        "if not (low > high and (not round)):",
        "if low > high and round:",
        "drop: raise ValueError(f'{low + 1}')",
        "if not is_cupy(low):",
        "return None",
        "high -= low",
        "drop: high += low",
        "return (low + high) * 2",
        "return (low - high) // 2",
        "return (low + high) // 3",
        "if is_cupy(a):",
        "return a[:]",
        "return a[2:]",
    }


def test_a_mutant_is_the_source_with_what_it_says():
    before = ast.unparse(ast.parse(TOY))
    for mutant in mutations.mutants("toy.py", TOY):
        after = ast.unparse(mutations.mutated(TOY, mutant))
        changed = [pair for pair in zip(before.split("\n"), after.split("\n"), strict=True)
                   if pair[0] != pair[1]]  # fmt: skip
        assert len(changed) == 1
        assert mutant.after in changed[0][1] or (changed[0][1].strip() == "pass")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("after", "ends"),
    [
        ("return a + b", 0),
        ("return a - b", 1),
        ("while a + b: pass", -signal.SIGALRM),
        ("x = 1 / 0", 1),
    ],
)
def test_a_child_runs_the_tests_on_the_mutant_alone(tmp_path, monkeypatch, after, ends):
    if ends == -signal.SIGALRM:  # the others end by themselves, however busy the machine is
        monkeypatch.setattr(trial, "PATIENCE", 2)
        monkeypatch.setattr(trial, "SLACK", 0.3)
    source = "def add(a, b):\n    return a + b\n"
    file = tmp_path / "added.py"
    file.write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n    grid\n")
    (tmp_path / "test_added.py").write_text(
        "from added import add\n\ndef test_add():\n    assert add(1, 1) == 2\n"
        "\ndef test_bad():\n    assert False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changed = file, ast.parse(source.replace("return a + b", after))
    chosen = {"test_added.py::test_add": 0.01}
    child = trial.start(
        ["test_added.py"], tmp_path / "child", changed=changed, chosen=chosen, root=tmp_path
    )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends
    assert file.read_text() == source


@pytest.mark.parametrize(
    ("code", "failed", "end"),
    [
        (0, "", ("survived", "")),
        (1, "test_a", ("killed", "test_a")),
        (-signal.SIGSEGV, None, ("killed", "SIGSEGV")),
        (-signal.SIGALRM, None, ("timed out", "")),
        (-signal.SIGKILL, None, ("survived", "killed from outside")),
        (4, None, ("killed", "conftest.py (import)")),
        (1, None, ("survived", "pytest ended with 1: text")),
    ],
)
def test_only_a_test_or_the_clock_or_a_crash_kills(runner, tmp_path, code, failed, end):
    (tmp_path / "output").write_text("text")
    if failed is not None:
        (tmp_path / "note").write_bytes(pickle.dumps({"failed": failed}))
    assert runner.outcome(code, tmp_path) == end


@pytest.mark.parametrize("codes", [(-signal.SIGALRM, 0), (-signal.SIGALRM, -signal.SIGALRM)])
def test_a_mutant_that_runs_out_of_time_is_tried_again_alone(runner, tmp_path, monkeypatch, codes):
    tried = []

    def ended(starts, folder, jobs):
        for name in list(starts):
            tried.append((name, jobs))
            yield name, codes[sum(one == name for one, _ in tried) - 1] if name == "0" else 0

    monkeypatch.setattr(runner, "ended", ended)
    sample = mutations.mutants("toy.py", TOY)[:2]
    tests = runner.Tests({"test": 1.0}, {"toy.py": {n: ["test"] for n in range(30)}})
    found = dict(runner.attempts(sample, tests, tmp_path, 2))
    assert tried == [("0", 2), ("1", 2), ("0", 1)]
    assert found[0][0] == ("timed out" if codes[1] else "survived")


def test_a_name_that_no_mutant_has_ends_the_run_at_once(runner, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "no such"])
    monkeypatch.setattr(trial, "prepare", pytest.fail)
    monkeypatch.setattr(runner, "SOURCES", ("io/memory.py",))
    with pytest.raises(SystemExit, match="no mutant's key contains 'no such'"):
        runner.main()
