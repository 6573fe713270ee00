"""The tables of ``docs/scaling.md`` and its plot: what was measured, and what the model says."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .extrapolation import HEAD, ROOM, SCENARIOS, Scenario, points
from .extrapolation import rows as extrapolated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
NOTHING = "No run on GPUs is in `benchmarks/results` yet.\n"
MEASURED, MAXK, INK = "#D55E00", "#009E73", "#0072B2"
#: Results of a folder: of the last run, and of one on four GPUs, which was put by under that name.
FILES = "distributed-gpu.json", "distributed-4-gpus.json"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _some(value: float | None) -> str:
    return _number(value or None)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


#: Columns of a table: the heading, the key in a row, and how it is written.
Columns = Sequence[tuple[str, str, Callable[[Any], str]]]
STEPS: Columns = (
    ("case", "case", str),
    ("one GPU, ms", "plain_ms", _number),
    ("step, ms", "ms", _number),
    ("speed-up", "speed_up", "{:.2f}".format),
    ("predicted, ms", "predicted_ms", _number),
    ("exchange, ms", "exchange_ms", _number),
    ("hidden", "hidden", _percent),
    ("predicted", "predicted_hidden", _percent),
    ("MiB sent", "sent_mib", _some),
    ("predicted", "predicted_mib", _some),
)
LINKS: Columns = (
    ("exchange alone", "case", str),
    ("MiB out of a rank", "mib", _number),
    ("ms", "ms", "{:.3f}".format),
    ("GiB/s", "gib_s", _number),
)


def write(folder: Path) -> None:
    """Write both blocks of the page from the results of a folder, and the plot into it."""
    found = runs_of(folder)
    page = PAGE.read_text(encoding="utf-8")
    for name, text in blocks(found).items():
        page = with_block(page, name, text)
    PAGE.write_text(page, encoding="utf-8")
    plot(found, folder / "distributed-scaling.png")


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the sections of each run on GPUs."""
    paths = [folder / name for name in FILES]
    return [json.loads(path.read_text())["sections"] for path in paths if path.exists()]


def blocks(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each block of the page."""
    marks = ["---:"] * len(HEAD)
    tables = [
        f"**{one.name}**\n\n{_markdown(HEAD, marks, *extrapolated(one))}" for one in SCENARIOS
    ]
    return {"measured": measured(runs), "extrapolated": "\n".join(tables)}


def with_block(page: str, name: str, text: str) -> str:
    """Return the page with that text in its block; SystemExit if it lacks the block."""
    begin = f"<!-- begin: {name}, by python -m benchmarks distributed --table -->\n"
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition("<!-- end")
    if not (found and end):
        lines = f"{begin.rstrip()} and <!-- end -->"
        raise SystemExit(f"{PAGE.name} lacks the lines {lines}, in this order.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def measured(runs: list[dict[str, Any]]) -> str:
    """Return Markdown of the sections of all runs."""
    parts = []
    for sections in runs:
        if "steps" in sections:
            parts.append(_table(sections["steps"], "A training step", STEPS))
        if "large" in sections:
            device = sections["large"]["machine"].get("device", "a GPU")
            parts += [_large(row, device) for row in sections["large"]["rows"]]
        if "bandwidth" in sections:
            parts.append(_table(sections["bandwidth"], "Exchanges alone", LINKS))
    return "\n".join(parts) or NOTHING


def _large(row: dict[str, Any], device: str) -> str:
    return (
        f"{row['vertices']:,} vertices train {row['hidden']} wide on {row['ranks']} {device}, and "
        f"one has no memory for that (for {row['fits']} it has): {_number(row['ms'])} ms a step, "
        f"{_number(row['peak_mib'] / 1024)} GiB on a GPU beside {_number(row['held_mib'] / 1024)} "
        f"of the graph and its features, {_number(row['entry_bytes'])} bytes an entry.\n"
    )


def _table(section: dict[str, Any], what: str, columns: Columns) -> str:
    facts = section["machine"]
    where = f"{facts.get('device', 'a GPU')}, {facts['date'][:10]}, `{facts['commit']}`"
    heads, marks = [head for head, *_ in columns], ["---", *["---:"] * (len(columns) - 1)]
    cells = ([form(row.get(key)) for _, key, form in columns] for row in section["rows"])
    return f"{what} on {where}:\n\n{_markdown(heads, marks, *cells)}"


def _markdown(*lines: Iterable[str]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# The plot


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds of a step over GPUs, a panel a scenario; measured points beside the first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.9 * len(SCENARIOS), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(SCENARIOS))
    for axes, scenario in zip(panels, SCENARIOS, strict=True):
        _draw(axes, scenario)
    for sections, mark in zip(runs, "sD", strict=False):
        steps = sections.get("steps", {"rows": [], "machine": {}})
        rows, device = steps["rows"], steps["machine"].get("device", "")
        here = [row for row in rows if row["case"].startswith("products community sage")]
        if here:
            ends = [row["ranks"] for row in here], [row["ms"] / 1e3 for row in here]
            panels[0].plot(*ends, mark, color=MEASURED, label=f"measured, {device}", zorder=3)
    panels[0].set_ylabel("seconds of a training step")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=6, fontsize=9)
    figure.suptitle("Three layers of GraphSAGE, 256 wide, as predicted for nodes of 8 H200")
    figure.savefig(path, dpi=150)
    print(f"  wrote {path}")


def _draw(axes: Any, scenario: Scenario) -> None:
    found = [*points(scenario)]
    ranks, steps = [point.ranks for point in found], [point.dense for point in found]
    maxk, alone = [point.maxk.total for point in found], steps[0].total

    def line(label: str, seconds: list[float], **style: Any) -> None:
        axes.plot(ranks, seconds, label=label, markersize=4, **style)

    line("step", [times.total for times in steps], color=INK, marker="o")
    line("of it computing", [times.compute for times in steps], color=INK, linestyle=":")
    line("step, MaxK 32", maxk, color=MAXK, marker="^", linestyle="--")
    even = [alone / count for count in ranks]
    line("one GPU's time shared out", even, color="black", linewidth=0.8)
    short = [point.ranks for point in found if point.bytes >= ROOM]
    if short:
        axes.axvspan(0.8, 1.4 * max(short), color="black", alpha=0.08, linewidth=0)
        axes.text(1, 0.02, "no room on 141 GB", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.axvline(8, color="black", linewidth=0.5, linestyle="--")
    axes.set(xlim=(0.8, 1300), xlabel="GPUs (dashed: a node of 8)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks[::2], [str(count) for count in ranks[::2]])
    axes.set_title(scenario.name, fontsize=10)
    axes.grid(alpha=0.3)
