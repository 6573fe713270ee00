"""The mutants are the changes that they say, and a test that fails kills one."""

import ast
import os
import signal

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

def host(a):
    if not is_cupy(a):
        return a[1:]
    import cupy
def elementwise(a):
    def kernel():
        return a + 4
    return kernel

    return a + 3
'''


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
    finder = trial.Finder(file, ast.parse(source.replace("return a + b", after)), tmp_path)
    chosen = {"test_added.py::test_add": 0.01}
    child = trial.start(
        ["test_added.py"], tmp_path / "child", finder=finder, chosen=chosen, root=tmp_path
    )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends
    assert file.read_text() == source
