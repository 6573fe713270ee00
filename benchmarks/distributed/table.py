"""The tables of ``docs/scaling.md`` and its plot: what was measured, and what the model says."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .extrapolation import ROOM, SCENARIOS, Point, Scenario, points
from .extrapolation import table as extrapolated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
BLOCKS = ("measured", "extrapolated")
NOTHING = "No run on GPUs is in `benchmarks/results` yet.\n"
MEASURED, MAXK, INK = "#D55E00", "#009E73", "#0072B2"


def write(folder: Path) -> None:
    """Write both blocks of the page from the results of a folder, and the plot into it."""
    found = sections_of(folder)
    page = PAGE.read_text(encoding="utf-8")
    for name, text in blocks(found).items():
        page = with_block(page, name, text)
    PAGE.write_text(page, encoding="utf-8")
    plot(found, folder / "distributed-scaling.png")


def sections_of(folder: Path) -> dict[str, Any]:
    """The sections measured on GPUs; none if there was no run."""
    path = folder / "distributed-gpu.json"
    found: dict[str, Any] = json.loads(path.read_text())["sections"] if path.exists() else {}
    return found


def blocks(sections: dict[str, Any]) -> dict[str, str]:
    """The text of each block of the page."""
    tables = [f"**{scenario.name}**\n\n{extrapolated(scenario)}" for scenario in SCENARIOS]
    return dict(zip(BLOCKS, (measured(sections), "\n".join(tables)), strict=True))


def with_block(page: str, name: str, text: str) -> str:
    """The page with that text in its block; SystemExit if it lacks the block."""
    begin, end = (
        f"<!-- begin: {name}, by python -m benchmarks distributed --table -->\n",
        "<!-- end",
    )
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(
            f"{PAGE.name} lacks the lines {begin.rstrip()} and {end} -->, in this order."
        )
    return f"{before}{begin}\n{text}\n{end}{after}"


def measured(sections: dict[str, Any]) -> str:
    """Markdown of the sections of a run."""
    parts = [
        function(sections[name])
        for name, function in (("steps", _steps), ("large", _large), ("bandwidth", _links))
        if name in sections
    ]
    return "\n".join(parts) or NOTHING


def _steps(section: dict[str, Any]) -> str:
    head = (
        "case",
        "one GPU, ms",
        "step, ms",
        "speed-up",
        "predicted, ms",
        "exchange, ms",
        "hidden",
        "predicted",
        "MiB sent",
        "predicted",
    )
    rows = []
    for row in section["rows"]:
        cells = (
            row["case"],
            _number(row["plain_ms"]),
            _number(row["ms"]),
            f"{row['speed_up']:.2f}",
            _number(row.get("predicted_ms")),
            _number(row.get("exchange_ms")),
            _share(row.get("hidden")),
            _share(row.get("predicted_hidden")),
            _number(row["sent_mib"] or None),
            _number(row["predicted_mib"] or None),
        )
        rows.append(cells)
    return f"{_where(section, 'A training step')}\n\n{_markdown(head, rows)}"


def _large(section: dict[str, Any]) -> str:
    lines = [
        f"{row['vertices']:,} vertices train {row['hidden']} wide on {row['ranks']} GPUs, and "
        f"one has no memory for that (for {row['fits']} it has): {_number(row['ms'])} ms a step, "
        f"{_number(row['peak_mib'] / 1024)} GiB on a GPU beside {_number(row['held_mib'] / 1024)} "
        f"of the graph and its features, {_number(row['entry_bytes'])} bytes an entry.\n"
        for row in section["rows"]
    ]
    return "\n".join(lines)


def _links(section: dict[str, Any]) -> str:
    rows = [
        (row["case"], _number(row["mib"]), f"{row['ms']:.3f}", _number(row["gib_s"]))
        for row in section["rows"]
    ]
    head = ("exchange alone", "MiB out of a rank", "ms", "GiB/s")
    return f"{_where(section, 'Exchanges alone')}\n\n{_markdown(head, rows)}"


def _where(section: dict[str, Any], what: str) -> str:
    facts = section["machine"]
    return f"{what} on {facts.get('device', 'a GPU')}, {facts['date'][:10]}, `{facts['commit']}`:"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# The plot


def plot(sections: dict[str, Any], path: Path) -> None:
    """Seconds of a step over GPUs, a panel a scenario; measured points beside the first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.9 * len(SCENARIOS), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(SCENARIOS))
    for axes, scenario in zip(panels, SCENARIOS, strict=True):
        _draw(axes, scenario, [*points(scenario)])
    steps = sections.get("steps", {"rows": [], "machine": {}})
    rows, device = steps["rows"], steps["machine"].get("device", "")
    here = [row for row in rows if row["case"].startswith("products community sage")]
    if here:
        ends = [row["ranks"] for row in here], [row["ms"] / 1e3 for row in here]
        panels[0].plot(*ends, "s", color=MEASURED, label=f"measured, {device}", zorder=3)
    panels[0].set_ylabel("seconds of a training step")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=6, fontsize=9)
    figure.suptitle("Three layers of GraphSAGE, 256 wide, as predicted for nodes of 8 H200")
    figure.savefig(path, dpi=150)
    print(f"  wrote {path}")


def _draw(axes: Any, scenario: Scenario, found: list[Point]) -> None:
    ranks = [point.ranks for point in found]
    lines = {
        "step": ([point.dense.total for point in found], {"color": INK, "marker": "o"}),
        "of it computing": (
            [point.dense.compute for point in found],
            {"color": INK, "linestyle": ":"},
        ),
        "step, MaxK 32": (
            [point.maxk.total for point in found],
            {"color": MAXK, "marker": "^", "linestyle": "--"},
        ),
        "one GPU's time shared out": (
            [found[0].dense.total / count for count in ranks],
            {"color": "black", "linewidth": 0.8},
        ),
    }
    for label, (seconds, style) in lines.items():
        axes.plot(ranks, seconds, label=label, markersize=4, **style)
    short = [point.ranks for point in found if point.bytes >= ROOM]
    if short:
        axes.axvspan(0.8, 1.4 * max(short), color="black", alpha=0.08, linewidth=0)
        axes.text(1, 0.02, "no room on 141 GB", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.axvline(8, color="black", linewidth=0.5, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(0.8, 1300)
    axes.set_xticks(ranks[::2], [str(count) for count in ranks[::2]])
    axes.set_xlabel("GPUs (dashed: a node of 8)")
    axes.set_title(scenario.name, fontsize=10)
    axes.grid(alpha=0.3)
