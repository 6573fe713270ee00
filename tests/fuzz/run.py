"""Fuzz the readers and sequences of calls: ``make fuzz``, or ``python tests/fuzz/run.py --help``.

A process for each target, until its share of the time is up; the run ends with 1 if one finds
something.  ``readers`` and ``calls`` are rounds of hypothesis with a seed each: a round that finds
something shrinks it, prints it and the command that repeats it.  ``bytes`` is atheris, which goes
on with files that reach other branches of the readers, and prints a finding as a line of
``corpus.txt``: ``test_fuzz.py`` repeats what that holds.
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
import zipfile
from base64 import b64encode
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

#: Examples of a round.
EXAMPLES = {"readers": 400, "bytes": 20_000, "calls": 25}
STEPS = 20
#: Packages whose branches lead ``bytes``.
INSTRUMENTED = [
    "sparsefmt.io",
    "sparsefmt.distributed.job.checkpoint",
    "sparsefmt.distributed.parts",
]
#: Address space that a reader may take beyond what the process has when it begins.
ADDRESS_SPACE = 2**30
#: Seconds after which a silent process hangs; hypothesis shrinks for a minute at most.
SILENT = 400
#: Fresh memory of malloc is of bytes 0x7F: huge numbers, indices out of range.
PERTURB = {"MALLOC_PERTURB_": "128"}


def main() -> int:
    """Run the targets, each for its share of the time; 0 if nothing was found."""
    args = arguments()
    if args.child:
        return work(args)
    seed = int(time.time()) % 10**6 if args.seed is None else args.seed
    targets = [args.only] if args.only else list(EXAMPLES)
    if not find_spec("atheris"):
        targets = [name for name in targets if name != "bytes"]
        print("bytes: left out, atheris is not installed")
    print(f"seed {seed}, {args.seconds} s, {' and '.join(targets)}, on {args.device}", flush=True)
    return max(
        [watched(one, seed, args, args.seconds / len(targets)) for one in targets], default=1
    )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", choices=sorted(EXAMPLES), help="one target; or all")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it")
    parser.add_argument("--seed", type=int, help="of the first round; by default the time's")
    parser.add_argument("--rounds", type=int, help="so many at most; 1 repeats a finding")
    parser.add_argument("--examples", type=int, help="of a round")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for calls")
    parser.add_argument("--keep", action="store_true", help="add new outcomes to corpus.txt")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def watched(target: str, seed: int, args: argparse.Namespace, seconds: float) -> int:
    """Run a target in a process of its own, and print it if that dies or hangs."""
    command = [sys.executable, __file__, target, "--child", f"--seed={seed}"]
    command += [f"--seconds={seconds}", f"--device={args.device}", *["--keep"] * args.keep]
    command += [f"--{name}={getattr(args, name)}" for name in ("rounds", "examples")
                if getattr(args, name)]  # fmt: skip
    threads = {f"{pool}_NUM_THREADS": "1" for pool in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **threads, **PERTURB, "TMPDIR": folder}
        child = subprocess.Popen(command, env=environment, cwd=folder)
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


def work(args: argparse.Namespace) -> int:
    """Go through rounds until the time is up; in a process that ``watched`` started."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
    end, examples = time.monotonic() + args.seconds, args.examples or EXAMPLES[args.only]
    if args.only != "calls":
        tracemalloc.start()  # for all of it, since each start leaves some KiB
    if args.only == "bytes":
        guided(args, examples)
    run, report = (of_readers if args.only == "readers" else of_calls)(args)
    place = 0
    while time.monotonic() < end and (args.rounds is None or place < args.rounds):
        seed = args.seed + place
        try:
            run(seed, examples)
        except BaseException:
            print(f"\n{args.only}: found by seed {seed}; once more, and smaller:\n  python "
                  f"tests/fuzz/run.py {args.only} --seed {seed} --rounds 1 --examples {examples} "
                  f"--device {args.device}\n", flush=True)  # fmt: skip
            raise
        place += 1
    print(f"{args.only}: {place} rounds of {examples}, seeds {args.seed} to "
          f"{args.seed + place - 1}, nothing found; {report()}", flush=True)  # fmt: skip
    return 0


def settings(examples: int, **others: object):
    """Return options of hypothesis for a round, which is not slow to shrink."""
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


def guided(args: argparse.Namespace, examples: int) -> None:
    """Let atheris look for files that reach other branches; it ends the process."""
    import atheris

    with redirect_stderr(StringIO()), atheris.instrument_imports(include=INSTRUMENTED):
        import readers
    zipfile.ZipExtFile._update_crc = lambda *_: None  # else no changed member gets any further
    folder, endings = Path(tempfile.mkdtemp()), sorted({file.ending for file in readers.seeds()})
    for place, file in enumerate(readers.seeds()):
        (folder / str(place)).write_bytes(bytes([endings.index(file.ending)]) + file.content)

    def read_or_refused(data: bytes) -> None:
        ending, content = endings[(data[0] if data else 0) % len(endings)], data[1:]
        options = {"format": None, "max_bytes": 2**24}
        try:
            readers.outcome(folder.parent, readers.File(ending, content), options)
        except BaseException:
            print(f"\nbytes: found\n{ending} {b64encode(content).decode()}", flush=True)
            raise

    runs = examples * args.rounds if args.rounds else -1
    options = [f"-max_total_time={args.seconds:.0f}", f"-seed={args.seed}", f"-runs={runs}"]
    options += ["-max_len=4096", "-verbosity=0", "-print_final_stats=1"]
    atheris.Setup(["bytes", str(folder), *options], read_or_refused)
    atheris.Fuzz()


def of_readers(args: argparse.Namespace):
    """Return a function that runs a round of mutated files, and one that returns a report."""
    import readers
    from hypothesis import given as drawing
    from hypothesis import seed as seeded

    outcomes: dict[str, readers.File] = {}
    readers.seeds()  # which are made with more memory than files are read
    folder = Path(tempfile.mkdtemp())
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def run(seed: int, examples: int) -> None:
        @seeded(seed)
        @settings(examples)
        @drawing(readers.files(), readers.OPTIONS)
        def read_or_refused(file: readers.File, options: dict[str, object]) -> None:
            key = f"{file.ending}: {readers.outcome(folder, file, options)}"
            if key not in outcomes or len(file.content) < len(outcomes[key].content):
                outcomes[key] = file

        read_or_refused()

    def report() -> str:
        kept = readers.keep([outcomes[key] for key in sorted(outcomes)]) if args.keep else 0
        return f"{len(outcomes)} different outcomes, {kept} files kept"

    return run, report


def of_calls(args: argparse.Namespace):
    """Return a function that runs a round of sequences of calls, and one that returns a report."""
    import torch
    from calls import Everything
    from devices import poison
    from hypothesis import seed as seeded
    from hypothesis.stateful import run_state_machine_as_test

    torch.set_num_threads(1)
    Everything.device = args.device

    def run(seed: int, examples: int) -> None:
        options = settings(examples, stateful_step_count=STEPS)
        with poison(args.device):
            run_state_machine_as_test(seeded(seed)(Everything), settings=options)

    return run, lambda: f"sequences of at most {STEPS} calls"


if __name__ == "__main__":
    raise SystemExit(main())
