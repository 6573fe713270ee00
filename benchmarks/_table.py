"""Options, tables, limits and the JSON of all benchmarks: a room adds cases and limits only.

A ``Benchmark`` has sections.  A section yields rows, dicts with a ``case``, which are printed as
they come, judged by its limits and merged into ``results/NAME-DEVICE.json``.  A row with ``wrong``,
the reason why its result is refused, is not kept.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsefmt.formats.arrays import parse_device

from . import _baselines, _harness

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: Of the real graphs, unless ``--data`` or ``$SPARSEFMT_DATA`` says otherwise.
DATA = ROOT.parent / "shared" / "data"
END = "<!-- end -->\n"  #: of a block of a page that results are written to
MACHINE = ("commit", "device", "cpu")

Row = dict[str, Any]
Number = float | Callable[[Row], float | None] | None


@dataclass(frozen=True)
class Target:
    """A figure over the cases of a section, and what it is to reach; without a limit: to know."""

    name: str
    value: float
    limit: float | None = None
    at_least: bool = True

    @property
    def ok(self) -> bool:
        """Return True if the figure reaches its limit; a NaN reaches none."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        if self.limit is None:
            return f"{self.name}: {self.value:.3g}"
        sign = ">=" if self.at_least else "<="
        verdict = "ok" if self.ok else "MISSED"
        return f"{self.name}: {self.value:.3g} (target {sign} {self.limit:g}) {verdict}"


@dataclass(frozen=True)
class Limit:
    """What a column of a section is to reach, by default on a GPU alone.

    ``of`` is the ``worst`` row (the largest, where ``most`` or ``high`` is given), their ``mean``
    (geometric), their ``median`` or ``share``, or ``each``.  ``by`` names columns that tell groups
    of rows apart, and ``where`` the rows that count.  ``least`` and ``most`` may depend on a row.
    """

    column: str
    of: str = "worst"
    least: Number = None
    most: Number = None
    by: tuple[str, ...] = ()
    where: Callable[[Row], bool] = lambda row: True
    high: bool = False
    on: tuple[str, ...] = ("cuda",)
    label: str = ""  #: what ``where`` chooses

    def targets(self, rows: list[Row], device: str) -> Iterator[Target]:
        """Yield the figures of these rows against their limits."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            if row.get(self.column) is not None and self.where(row):
                groups.setdefault(tuple(row[key] for key in self.by), []).append(row)
        high = self.most is not None or self.high
        for group, members in groups.items():
            name = " ".join([*map(str, group), self.column, *[self.label] * bool(self.label)])
            for text, row, value in self._figures(name, members, high=high):
                limit = self.most if self.most is not None else self.least
                limit = limit(row) if callable(limit) else limit
                limit = limit if device in self.on else None
                yield Target(text, value, limit, at_least=not high)

    def _figures(
        self, name: str, rows: list[Row], *, high: bool
    ) -> Iterator[tuple[str, Row, float]]:
        column = self.column
        if self.of == "each":
            for row in rows:
                yield f"{row['case']} {column}", row, row[column]
        elif self.of == "worst":
            row = (max if high else min)(rows, key=lambda row: row[column])
            yield f"{name}, worst ({row['case']})", row, row[column]
        elif self.of == "mean":
            mean = geomean(row[column] for row in rows)
            yield f"{name}, geomean of {len(rows)}", rows[0], mean
        else:
            average = statistics.median if self.of == "median" else statistics.fmean
            yield f"{name}, {self.of}", rows[0], average([row[column] for row in rows])


def both(column: str, mean: Number = None, worst: Number = None, **more: Any) -> Any:
    """Return the limits of the geometric mean and the worst of a speed-up."""
    return Limit(column, "mean", least=mean, **more), Limit(column, least=worst, **more)


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


Judge = Callable[[list[Row]], list[Target]]


@dataclass(frozen=True)
class Section:
    """Rows of one kind with their limits; ``only`` on one device, run unless not ``default``."""

    rows: Callable[[argparse.Namespace], Iterator[Row]]
    limits: tuple[Limit, ...] = ()
    only: str = ""
    default: bool = True


@dataclass(frozen=True)
class Benchmark:
    """Sections by name, with the options that they read beyond those of all benchmarks."""

    name: str
    doc: str | None
    sections: dict[str, Section]
    extra: dict[str, Callable[[str], Any]] = field(default_factory=dict)

    def __call__(self, argv: list[str]) -> int:
        """Run the sections that the options ask for; 1 if a result was wrong."""
        return self.run(self.parse(argv))

    def run(self, options: argparse.Namespace) -> int:
        """Run the sections of parsed options; 1 if a result was wrong."""
        return 0 if all([self.measure(name, options) for name in options.sections]) else 1

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Read the options; ``DeviceError`` if the device is not there."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {self.name}",
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(parser, **({"widths": numbers} | self.extra))
        parser.add_argument("--sections", type=some_of(self.sections), help=",".join(self.sections))
        options = parser.parse_args(argv)
        other = {"cpu": "cuda", "cuda": "cpu"}[options.device]
        chosen = options.sections or [n for n, one in self.sections.items() if one.default]
        here = [name for name in chosen if self.sections[name].only != other]
        if (len(here) < len(chosen) and options.sections) or not here:
            name = next(name for name in chosen if name not in here)
            parser.error(f"section {name} needs --device {other}")
        options.sections = here
        parse_device(options.device)
        options.cuda = options.device == "cuda"
        threads = {} if options.cuda else {"threads": _baselines.use_threads(options.threads)}
        options.facts = {"device": options.device} | threads
        return options

    def measure(self, name: str, options: argparse.Namespace) -> bool:
        """Run one section; return True if no result is wrong."""
        section, rows = self.sections[name], []
        print(f"\n== {self.name} {name}, {options.device}", flush=True)
        head: tuple[str, ...] = ()
        for row in section.rows(options):
            head = print_row(row, head)
            rows.append(row | options.facts)
            _harness.free()

        def judge(rows: list[Row]) -> list[Target]:
            return [one for limit in section.limits for one in limit.targets(rows, options.device)]

        return keep(self, name, rows, judge, cuda=options.cuda, folder=options.out)


# Options


def add_options(parser: argparse.ArgumentParser, **more: Callable[[str], Any]) -> None:
    """Add what every benchmark takes, and ``more``."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--graphs", type=names, help="of benchmarks/_graphs.py, or paths")
    for name, kind in more.items():
        parser.add_argument(f"--{name}", type=kind)
    quick = "few runs of the smallest cases, kept apart from the results"
    parser.add_argument("--quick", action=_Quick, nargs=0, default=False, help=quick)
    parser.add_argument("--out", type=Path, help="folder of the JSON, by default results/")
    parser.add_argument("--threads", type=positive, default=2, help="on the CPU")
    data = Path(os.environ.get("SPARSEFMT_DATA", DATA))
    parser.add_argument("--data", type=Path, default=data, help="folder of the real graphs")


class _Quick(argparse.Action):
    """The flag, and a folder of its own unless one is given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        namespace.quick = True
        namespace.out = namespace.out or RESULTS / "quick"


def positive(text: str) -> int:
    """Return a number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Return positive numbers with commas."""
    return tuple(map(positive, text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """Return the names of a list with commas."""
    return tuple(text.split(","))


def some_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of known names with commas."""

    def split(text: str) -> tuple[str, ...]:
        unknown = [name for name in names(text) if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return names(text)

    return split


# Print


def print_row(row: Row, head: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Print the scalars of a row, under their names where those differ from ``head``; the names."""
    cells = {key: _cell(value) for key, value in row.items() if _is_cell(key, value)}
    if tuple(cells) != head:
        print("  ".join(f"{key:>{_width(key)}}" for key in cells))
    print("  ".join(f"{text:>{_width(key)}}" for key, text in cells.items()), flush=True)
    return tuple(cells)


def _is_cell(key: str, value: Any) -> bool:
    return key == "case" or isinstance(value, float | int) or key in ("wrong", "skipped", "chosen")


def _width(key: str) -> int:
    return 36 if key == "case" else max(len(key), 8)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(*lines: Iterable[str]) -> str:
    """Return lines of a Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_block(page: Path, begin: str, text: str) -> None:
    """Write text into the block of the page that begins so; SystemExit if it lacks the block."""
    before, start, rest = page.read_text(encoding="utf-8").partition(begin)
    _, end, after = rest.partition(END)
    if not (start and end):
        lines = f"{begin.rstrip()} and {END.rstrip()}"
        raise SystemExit(
            f"{page} lacks the lines {lines}, in this order: put them where it belongs"
        )
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


# Keep


def keep(
    benchmark: Benchmark,
    section: str,
    rows: list[Row],
    judge: Judge,
    *,
    cuda: bool,
    folder: Path | None = None,
) -> bool:
    """Print a section's figures against targets and merge it into ``NAME-DEVICE.json``.

    Rows are known by their ``case``.  Earlier ones of the same clean commit on the same device stay
    unless measured again; other sections stay as they are, unless the benchmark has no such.

    Returns
    -------
    bool
        True if no row is wrong.
    """
    right = [row for row in rows if "wrong" not in row]
    for at, row in enumerate(right):
        medians = {k: one.spread for k, one in row.items() if isinstance(one, _harness.Median)}
        right[at] = row | ({"spread": medians} if medians else {})
    wrong = [row for row in rows if "wrong" in row]
    for row in wrong:
        print(f"  WRONG, not reported: {row['case']}: {row['wrong']}")
    if not right:
        return not wrong
    path = (folder or RESULTS) / f"{benchmark.name}-{'gpu' if cuda else 'cpu'}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    sections = {k: v for k, v in kept.get("sections", {}).items() if k in benchmark.sections}
    here = _harness.machine(cuda=cuda)
    merged = _merged(sections.get(section), right, here)
    targets = judge(merged)
    if wrong:
        targets.append(Target("wrong cases, not reported", len(wrong), 0, at_least=False))
    for target in targets:
        print(f"  {target}")
    sections[section] = {
        "machine": here,
        "targets": [asdict(target) | {"ok": target.ok} for target in targets],
        "rows": merged,
    }
    path.write_text(json.dumps({"sections": sections}, indent=1) + "\n")
    print(f"  wrote {section} to {path}", flush=True)
    return not wrong


def _merged(earlier: dict[str, Any] | None, rows: list[Row], here: dict[str, Any]) -> list[Row]:
    clean = here["commit"] != "unknown" and not here["commit"].endswith("-dirty")
    if not earlier or not clean or any(earlier["machine"].get(k) != here.get(k) for k in MACHINE):
        return rows
    new = {row["case"] for row in rows}
    return [row for row in earlier["rows"] if row["case"] not in new] + rows
