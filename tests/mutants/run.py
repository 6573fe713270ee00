"""Mutate formats, conversions, checks, readers and partitions: ``make mutants``, or ``--help``.

A seeded sample of small changes, each in a process of its own, against the tests that run the
changed line, quick ones first.  A test kills the mutant if it fails, or takes ten times as long in
two tries.
"""

import argparse
import ast
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import trial  # noqa: E402
from mutations import Mutant, mutants, mutated  # noqa: E402

#: Modules to mutate.
SOURCES = (
    *("formats/*.py", "graph/*.py", "io/*.py"),
    *("distributed/job/checkpoint.py", "distributed/parts/*.py"),
)
#: Modules of kernels for a GPU.
LEFT = ("faults.py",)
#: Tests that kill mutants, in groups that take about equally long.
TESTS = (
    ("tests/formats",),
    ("tests/io", "tests/interop", "tests/tools/test_testing.py", "tests/tools/test_stats.py"),
    (
        "tests/distributed/test_damage.py",
        "tests/distributed/test_checkpoint.py",
        "tests/distributed/test_partition.py",
    ),
)
#: Mutants that no test can kill, with reasons.
SURVIVORS = HERE / "survivors.txt"
#: Seconds of tests for each mutant, beside imports; those that are left out killed nothing.
BUDGET = 30.0


def main() -> int:
    """Try the sample; 0 if enough of it is killed."""
    given = arguments()
    sample = sampled(given)
    if not sample:
        raise SystemExit(f"no mutant's key contains {given.only!r}")
    trial.prepare()
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        tests = baseline(folder, given.jobs)
        print(f"seed {given.seed}: {len(sample)} of {len(everything())} mutants, "
              f"{len(tests.seconds)} tests", flush=True)  # fmt: skip
        outcomes = dict(attempts(sample, tests, folder, given.jobs))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    share = report(sample, outcomes, time.monotonic() - began)
    return int(share < given.least)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=20261125, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--least", type=float, default=0.85, help="share to be killed")
    parser.add_argument("--only", default="", help="mutants whose key has this pattern")
    return parser.parse_args()


@dataclass
class Tests:
    """Seconds of each test, and the lines that it runs."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def of(self, mutant: Mutant) -> dict[str, float]:
        """Choose the tests of a mutant: quick ones first, and many functions before many cases.

        Behind them come all others, if the line also runs when its module is imported.
        """
        lines = self.lines.get(mutant.file, {})
        found = {test for line in mutant.lines for test in lines.get(line, ())}
        others = set(self.seconds) if "" in found else set()
        cases: Counter[tuple[bool, str]] = Counter()
        ranked = []
        for test in sorted((found | others) - {""}, key=lambda test: (self.seconds[test], test)):
            late, function = test not in found, test.partition("[")[0]
            ranked.append((late, cases[late, function] // 2, len(ranked), test))
            cases[late, function] += 1
        chosen: dict[str, float] = {}
        left = BUDGET
        for *_, test in sorted(ranked):
            if self.seconds[test] <= left or not chosen:
                chosen[test] = self.seconds[test]
                left -= self.seconds[test]
        return chosen


def files() -> list[Path]:
    """List the modules that are mutated."""
    found = [path for pattern in SOURCES for path in sorted(trial.PACKAGE.glob(pattern))]
    return [path for path in found if path.name not in LEFT]


def everything() -> list[Mutant]:
    """List every mutant."""
    name = {path: path.relative_to(trial.PACKAGE).as_posix() for path in files()}
    return [mutant for path in files() for mutant in mutants(name[path], path.read_text())]


def sampled(given: argparse.Namespace) -> list[Mutant]:
    """Draw the sample."""
    found = [mutant for mutant in everything() if re.search(given.only, mutant.key)]
    return random.Random(given.seed).sample(found, min(given.count, len(found)))


def baseline(folder: Path, jobs: int) -> Tests:
    """Run all tests without a mutant, twice: for their lines, then as mutants have them."""
    found = Tests()
    for note in noted("lines", lambda group: {"lines_of": files()}, folder, jobs):
        found.seconds.update(note["seconds"])
        for file, lines in note["lines"].items():
            mine = found.lines.setdefault(Path(file).relative_to(trial.PACKAGE).as_posix(), {})
            for line, tests in lines.items():
                mine.setdefault(line, []).extend(tests)
    quick = sorted(found.seconds, key=found.seconds.__getitem__)
    unchanged = files()[0], ast.parse(files()[0].read_text())

    def in_another_order(group: tuple[str, ...]) -> dict:
        chosen = {test: found.seconds[test] for test in quick if test.startswith(group)}
        return {"changed": unchanged, "chosen": chosen}

    for note in noted("order", in_another_order, folder, jobs):
        found.seconds.update(note["seconds"])
    return found


def noted(name: str, options: Callable, folder: Path, jobs: int) -> Iterator[dict]:
    """Run all tests, a child for each group, and yield their notes; end if a test fails."""
    starts = {f"{name}{n}": {"tests": [*group], **options(group)} for n, group in enumerate(TESTS)}
    for child, status in ended(starts, folder, jobs):
        if status:
            print((folder / child / "output").read_text()[-4000:])
            raise SystemExit("the tests fail without a mutant: nothing to report")
        yield pickle.loads((folder / child / "note").read_bytes())


def ended(starts: dict, folder: Path, jobs: int) -> Iterator[tuple[str, int]]:
    """Run so many children at a time, and give each one's name and status when it ends."""
    waiting, running = list(starts.items()), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, options = waiting.pop(0)
            options = options() if callable(options) else options
            running[trial.start(folder=folder / name, **options)] = name
        child, status = os.wait()
        name = running.pop(child)
        try:
            os.killpg(child, signal.SIGKILL)  # what a test has started and left
        except ProcessLookupError:
            pass
        yield name, os.waitstatus_to_exitcode(status)


def attempts(
    sample: list[Mutant], tests: Tests, folder: Path, jobs: int
) -> Iterator[tuple[int, tuple[str, str]]]:
    """Try each mutant: how it ended, and what killed it."""
    starts = {}
    for number, mutant in enumerate(sample):
        chosen = tests.of(mutant)
        if chosen:
            starts[str(number)] = lambda mutant=mutant, chosen=chosen: options_of(mutant, chosen)
        else:
            yield number, ("survived", "no test runs it")
    began, done, alive, late = time.monotonic(), 0, 0, {}
    for tries, together in ((starts, jobs), (late, 1)):
        for name, code in ended(tries, folder, together):
            end, by = outcome(code, folder / name)
            shutil.rmtree(folder / name, ignore_errors=True)
            if end == "timed out" and tries is starts:  # perhaps the machine was busy: again, alone
                late[name] = starts[name]
                continue
            done, alive = done + 1, alive + (end == "survived")
            print(f"{done}/{len(starts)} {time.monotonic() - began:.0f} s, {alive} alive: {end}: "
                  f"{sample[int(name)].key}  [{by}]", flush=True)  # fmt: skip
            yield int(name), (end, by)


def options_of(mutant: Mutant, chosen: dict[str, float]) -> dict:
    """Give what ``trial.start`` needs for a mutant."""
    path = trial.PACKAGE / mutant.file
    files = dict.fromkeys(test.partition("::")[0] for test in chosen)
    changed = path, mutated(path.read_text(), mutant)
    return {"tests": list(files), "changed": changed, "chosen": chosen}


def outcome(code: int, folder: Path) -> tuple[str, str]:
    """Say how a child ended: by a test that failed, by the clock, by a signal, or unharmed.

    A SIGKILL is nobody's test: the machine ran out of memory, or somebody ended the child.
    """
    if code == -signal.SIGALRM:
        return "timed out", ""
    if code == -signal.SIGKILL:
        return "survived", "killed from outside"
    if code < 0:
        return "killed", signal.Signals(-code).name
    if code in (1, 2) and (folder / "note").is_file():
        return "killed", pickle.loads((folder / "note").read_bytes())["failed"]
    if code == 4:  # all were collected before
        return "killed", "conftest.py (import)"
    if code == 0:
        return "survived", ""
    return "survived", f"pytest ended with {code}: {(folder / 'output').read_text()[-300:]}"


def reasons() -> dict[str, str]:
    """Read why no test can kill some mutants: key -> reason."""
    lines = [line for line in SURVIVORS.read_text().splitlines() if line and line[0] != "#"]
    return dict(line.rsplit(" | ", 1) for line in lines)


def report(sample: list[Mutant], outcomes: dict[int, tuple[str, str]], seconds: float) -> float:
    """Print survivors; return the share that is killed of those not equivalent."""
    known, ends = reasons(), Counter()
    for number, mutant in sorted(enumerate(sample), key=lambda pair: pair[1].key):
        end, by = outcomes[number]
        if end == "survived" and mutant.key in known:
            end = "equivalent"
        ends[end] += 1
        if end == "survived":
            print(f"\nsurvived: {mutant.key}" + f" ({by})" * bool(by))
            print(f"{mutant.file}:{mutant.lines[0]}\n-{mutant.before}\n+{mutant.after}")
        if mutant.key in known and end != "equivalent":
            print(f"\n{mutant.key} is said to be equivalent, and was {end} {by}")
    dead = ends["killed"] + ends["timed out"]
    share = dead / max(len(sample) - ends["equivalent"], 1)
    print(f"\n{dict(ends)} of {len(sample)} in {seconds:.0f} s: {share:.1%} of those that are not "
          f"equivalent are killed")  # fmt: skip
    return share


if __name__ == "__main__":
    raise SystemExit(main())
