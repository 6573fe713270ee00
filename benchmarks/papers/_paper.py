"""A paper: what it publishes beside what was measured here, as tables, JSON and a picture."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sparsefmt.plot import KIND_COLOURS, save

from .._table import RESULTS, Benchmark, Row, geomean, markdown

Rows = Mapping[str, list[Row]]


@dataclass(frozen=True)
class Claim:
    """A figure that a paper publishes, and the column of a section that measures the same here."""

    text: str
    theirs: str
    section: str
    column: str
    where: Callable[[Row], bool] = lambda row: True
    average: Callable[[Any], float] = geomean

    def line(self, rows: Rows) -> tuple[str, ...]:
        """Return the claim, the paper's figure, ours and the number of cases that it is of."""
        found = (row.get(self.column) for row in rows.get(self.section, ()) if self.where(row))
        here = [value for value in found if value is not None]
        ours = f"{self.average(here):.3g}" if here else "not measured"
        return self.text, self.theirs, ours, str(len(here))


@dataclass(frozen=True)
class Panel:
    """A part of a picture: ``y`` against ``x`` with a line for each ``by``; bars without ``x``."""

    section: str
    y: str
    title: str
    x: str = ""
    by: tuple[str, ...] = ()
    log: bool = False

    def draw(self, axes: Any, rows: Rows) -> None:
        """Draw the rows of this panel."""
        here = [r for r in rows.get(self.section, ()) if r.get(self.y) is not None]
        axes.set_title(self.title, fontsize=10)
        if not here:
            axes.text(0.5, 0.5, "not measured here", ha="center", transform=axes.transAxes)
            axes.set_axis_off()
        elif not self.x:
            names = [row["case"] for row in here]
            axes.barh(names, [row[self.y] for row in here], color=KIND_COLOURS[0])
            axes.invert_yaxis()
            axes.tick_params(axis="y", labelsize=7)
            axes.axvline(1.0, color="#333333", linewidth=0.8)
        else:
            self._lines(axes, here)

    def _lines(self, axes: Any, rows: list[Row]) -> None:
        """Draw a line for each group of rows."""
        lines: dict[str, list[Row]] = {}
        for row in rows:
            lines.setdefault(" ".join(str(row[name]) for name in self.by), []).append(row)
        for at, (name, line) in enumerate(lines.items()):
            line = sorted(line, key=lambda row: row[self.x])
            points = [[row[key] for row in line] for key in (self.x, self.y)]
            colour = KIND_COLOURS[at % len(KIND_COLOURS)]
            axes.plot(*points, "o-", markersize=3, linewidth=1, label=name, color=colour)
        axes.set_xlabel(self.x, fontsize=8)
        if self.log:
            axes.set_xscale("log", base=2)
        if len(lines) > 1:
            axes.legend(fontsize=6)


@dataclass(frozen=True)
class Paper:
    """Tables of a paper, the figures that it publishes for them, and the panels of a picture.

    ``elsewhere`` names the result and the section that a table is also part of: it is read there
    where the paper's own result has none.
    """

    benchmark: Benchmark
    claims: tuple[Claim, ...]
    panels: tuple[Panel, ...]
    elsewhere: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def run(self, options: argparse.Namespace) -> int:
        """Measure the sections asked for, print claims beside figures, and draw all that is there.

        Returns 1 if a result was wrong.
        """
        status = self.benchmark.run(options)
        folder, device = options.out or RESULTS, "gpu" if options.cuda else "cpu"
        if rows := self.rows(folder, device):
            path = folder / f"{self.benchmark.name}-{device}.svg"
            print("\n" + self.table(rows))
            save(self.picture(rows), path)
            print(f"  drew {path}")
        return status

    def rows(self, folder: Path, device: str) -> Rows:
        """Return the rows of each table that a folder holds results of."""
        rows = _rows_of(folder / f"{self.benchmark.name}-{device}.json")
        for name, (other, section) in self.elsewhere.items():
            there = _rows_of(folder / f"{other}-{device}.json")
            if name not in rows and section in there:
                rows[name] = there[section]
        return rows

    def table(self, rows: Rows) -> str:
        """Return the claims beside our figures, in Markdown."""
        head = ("claim", "paper, on a GPU", "here", "cases")
        return markdown(head, ["---"] * 4, *(claim.line(rows) for claim in self.claims))

    def picture(self, rows: Rows) -> Figure:
        """Draw the panels side by side."""
        most = max([len(rows.get(p.section, ())) for p in self.panels if not p.x], default=0)
        size = (5 * len(self.panels), max(4.0, 0.15 * most))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(self.panels), squeeze=False)[0]
        for one, panel in zip(axes, self.panels, strict=True):
            panel.draw(one, rows)
        return figure


def _rows_of(path: Path) -> dict[str, list[Row]]:
    """Return the rows of each section of a result; none where there is no file."""
    sections = json.loads(path.read_text())["sections"] if path.exists() else {}
    return {name: section["rows"] for name, section in sections.items()}


def of(**values: Any) -> Callable[[Row], bool]:
    """Return the test of a row for a value of each of these columns."""
    return lambda row: all(row.get(column) == value for column, value in values.items())
