"""Fuzz the readers and sequences of calls: ``make fuzz``, or ``python tests/fuzz/run.py --help``.

Rounds of hypothesis with a seed each, in a process for each target, until the time is up.  A round
that finds something shrinks it, prints it and the command that repeats it; the run ends with 1.
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

#: Examples of a round.
EXAMPLES = {"readers": 400, "calls": 25}
STEPS = 20
#: Address space that a reader may take beyond what the process has when it begins.
ADDRESS_SPACE = 2**30
#: Seconds after which a silent process hangs; hypothesis shrinks for a minute at most.
SILENT = 400
#: Fresh memory of malloc is of bytes 0x7F: huge numbers, indices out of range.
PERTURB = {"MALLOC_PERTURB_": "128"}


def main() -> int:
    """Run both targets, each for its share of the time; 0 if nothing was found."""
    given = arguments()
    if given.child:
        return work(given)
    seed = int(time.time()) % 10**6 if given.seed is None else given.seed
    targets = [given.only] if given.only else list(EXAMPLES)
    print(f"seed {seed}, {given.seconds} s, {' and '.join(targets)}, on {given.device}", flush=True)
    return max(watched(target, seed, given, given.seconds / len(targets)) for target in targets)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", choices=sorted(EXAMPLES), help="one target; or both")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it")
    parser.add_argument("--seed", type=int, help="of the first round; by default the time's")
    parser.add_argument("--rounds", type=int, help="so many at most; 1 repeats a finding")
    parser.add_argument("--examples", type=int, help="of a round")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for calls")
    parser.add_argument("--keep", action="store_true", help="add new outcomes to corpus.txt")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def watched(target: str, seed: int, given: argparse.Namespace, seconds: float) -> int:
    """Run a target in a process of its own, and say so where it dies or hangs."""
    command = [sys.executable, __file__, target, "--child", f"--seed={seed}"]
    command += [f"--seconds={seconds}", f"--device={given.device}"]
    command += [f"--{name}={getattr(given, name)}" for name in ("rounds", "examples")
                if getattr(given, name)]  # fmt: skip
    command += ["--keep"] * given.keep
    threads = {f"{pool}_NUM_THREADS": "1" for pool in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **threads, **PERTURB, "TMPDIR": folder}
        child = subprocess.Popen(command, env=environment)
        try:
            code = child.wait(timeout=seconds + SILENT)
        except subprocess.TimeoutExpired:
            child.kill()
            print(f"{target}: no end after {seconds + SILENT:.0f} s, the last round hangs")
            return 1
        if code < 0:
            print(f"{target}: killed by {signal.Signals(-code).name} in the last round")
            left = [path for path in Path(folder).rglob("*") if path.is_file()]
            for path in left[:1]:
                print(f"it was reading {path.name}: {path.read_bytes()!r}")
    return int(code != 0)


def work(given: argparse.Namespace) -> int:
    """Go through rounds until the time is up; in a process that ``watched`` started."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
    end, examples = time.monotonic() + given.seconds, given.examples or EXAMPLES[given.only]
    run, report = TARGETS[given.only](given)
    place = 0
    while time.monotonic() < end and (given.rounds is None or place < given.rounds):
        seed = given.seed + place
        try:
            run(seed, examples)
        except BaseException:
            print(f"\n{given.only}: found by seed {seed}; once more, and smaller:\n  python "
                  f"tests/fuzz/run.py {given.only} --seed {seed} --rounds 1 --examples {examples} "
                  f"--device {given.device}\n", flush=True)  # fmt: skip
            raise
        place += 1
    print(f"{given.only}: {place} rounds of {examples}, seeds {given.seed} to "
          f"{given.seed + place - 1}, nothing found; {report()}", flush=True)  # fmt: skip
    return 0


def settings(examples: int, **others: object):
    """Options of hypothesis for a round, which is not slow to shrink."""
    import hypothesis
    from hypothesis.internal.conjecture import engine

    engine.MAX_SHRINKING_SECONDS = 60
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        **others,
    )


def of_readers(given: argparse.Namespace):
    """Give a function that runs a round of mutated files, and what there is to say in the end."""
    import readers
    from hypothesis import given as drawing
    from hypothesis import seed as seeded

    outcomes: dict[str, readers.File] = {}
    folder = Path(tempfile.mkdtemp())
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def run(seed: int, examples: int) -> None:
        @seeded(seed)
        @settings(examples)
        @drawing(readers.files(), readers.OPTIONS)
        def read_or_refused(file: readers.File, options: dict[str, object]) -> None:
            text = readers.outcome(folder, file, options)
            key = f"{file.ending}: {text}"
            if key not in outcomes or len(file.content) < len(outcomes[key].content):
                outcomes[key] = file

        read_or_refused()

    def report() -> str:
        kept = readers.keep([outcomes[key] for key in sorted(outcomes)]) if given.keep else 0
        return f"{len(outcomes)} different outcomes, {kept} files kept"

    return run, report


def of_calls(given: argparse.Namespace):
    """Give a function that runs a round of sequences of calls, and nothing to say."""
    import torch
    from devices import poison
    from gradients import Everything
    from hypothesis import seed as seeded
    from hypothesis.stateful import run_state_machine_as_test

    torch.set_num_threads(1)
    Everything.device = given.device
    steps = [0]

    def run(seed: int, examples: int) -> None:
        options = settings(examples, stateful_step_count=STEPS)
        with poison(given.device):
            run_state_machine_as_test(seeded(seed)(Everything), settings=options)
        steps[0] += examples

    return run, lambda: f"{steps[0]} sequences of at most {STEPS} calls"


TARGETS = {"readers": of_readers, "calls": of_calls}

if __name__ == "__main__":
    raise SystemExit(main())
