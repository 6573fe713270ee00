"""The tables of ``docs/scaling.md``: what was measured, and what the model says of more GPUs.

Constants are those of an H200 and of nodes of 8; those that were not measured say so.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._table import ROOT, markdown, write_block
from .model import Link, Machine, Share, Times, even_share, fitted, memory, replicated, step
from .models import HIDDEN, ITEM, layers_of

#: Measured: exchanges between two GPUs, 0.03 ms at 4 MiB, 245 and 310 GiB/s at 64 and 512 MiB.
#: Assumed: 2 microseconds for each further rank.
NVLINK = replace(
    fitted([4 << 20, 64 << 20, 512 << 20], [0.03e-3, 64 / 245 / 1024, 512 / 310 / 1024]), peer=2e-6
)
#: Assumed: 400 Gbit/s a GPU between nodes.
NETWORK, NODE = 50e9, 8
#: Measured: 6.6 ms for a product of 123.7 M entries, 128 wide, and a copy at 4.3 TB/s.  Assumed:
#: float32 matrix products at 45 TFLOP/s.
H200 = Machine(gathered=123_718_280 * 128 * 4 / 6.6e-3, flops=45e12, copied=4.3e12)
#: Assumed: arrays of the width of a layer that the rest of a step reads or writes.
PASSES = 12
#: Bytes that a ``DistGraph`` keeps of an entry: measured, 36.0 of a graph of 309 M entries on two
#: GPUs (section ``large``).
ENTRY = 36
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
#: Share of the memory of a GPU of 141 GB that a step may fill.
ROOM = 0.9 * 141e9
#: The table begins where a rank needs less than so many times that.
SHOWN = 60


@dataclass(frozen=True)
class Scenario:
    """A graph by its sizes, in an order that leaves some of its entries between ranks."""

    name: str
    vertices: float
    entries: float
    cut: float  #: share of the entries between ranks if there are many; 1 of a random order

    def share(self, ranks: int) -> Share:
        """Return the share of each rank, all alike."""
        return even_share(self.vertices, self.entries, ranks, self.cut * (1 - 1 / ranks))


#: Features and classes of each.
SIZES = 100, 47
SCENARIOS = (
    Scenario("products, communities in a row", 2_449_029, 123_718_280, 0.3),
    Scenario("10^11 entries, a tenth between ranks", 2e9, 1e11, 0.1),
    Scenario("10^11 entries, random", 2e9, 1e11, 1.0),
)


@dataclass(frozen=True)
class Point:
    """What the model says of a number of ranks."""

    ranks: int
    bytes: float  #: of the memory of a rank
    halo: float  #: vertices that a rank reads of others
    replicated: float  #: rows that a rank moves in a product in 1.5-D
    dense: Times
    maxk: Times

    @property
    def fits(self) -> bool:
        """Return True if a GPU of 141 GB has as much memory."""
        return self.bytes < ROOM


def link(ranks: int) -> Link:
    """Return what joins a rank to so many: NVLink in its node, and the network at the same time."""
    outside = max(ranks - NODE, 0) / max(ranks - 1, 1)
    slowest = max(outside / NETWORK, (1 - outside) / NVLINK.bandwidth)
    return replace(NVLINK, bandwidth=1 / slowest)


def points(scenario: Scenario) -> Iterator[Point]:
    """Yield each number of ranks."""
    dense, maxk = (layers_of(name, *SIZES, HIDDEN) for name in ("sage", "maxk"))
    kept = [
        replace(layer, forward=one.forward, backward=one.backward) if layer.forward else layer
        for layer, one in zip(dense, maxk, strict=True)
    ]
    widths = sum(layer.width for layer in dense)
    machine = replace(H200, rest=PASSES * widths * ITEM / H200.copied)
    parameters = sum(layer.flops for layer in dense) * 2
    for ranks in RANKS:
        share = scenario.share(ranks)
        given = share, machine, link(ranks)
        yield Point(
            ranks,
            memory(dense, share, features=SIZES[0], entry=ENTRY),
            share.halo,
            replicated(scenario.vertices, ranks)[1],
            *(step(one, *given, ranks=ranks, parameters=parameters) for one in (dense, kept)),
        )


HEAD = "GPUs", "GB a GPU", "step, s", "efficiency", "exchange, s", "not hidden, s"
HEAD += "step with MaxK 32, s", "1.5-D moves, of 1-D"


def rows(scenario: Scenario) -> Iterator[tuple[str, ...]]:
    """Yield cells for each number of ranks that has room for its vertices and entries."""
    found = [*points(scenario)]
    for point in found:
        times, size = point.dense, point.bytes / 1e9
        if point.bytes < SHOWN * ROOM:
            yield (
                f"{point.ranks:,}",
                f"{size:{',.0f' if size >= 100 else '.3g'}}{'' if point.fits else ' (too much)'}",
                f"{times.total:.3g}",
                f"{found[0].dense.total / times.total / point.ranks:.0%}",
                f"{times.exchange:.3g}",
                f"{times.exposed:.3g}",
                f"{point.maxk.total:.3g}",
                f"{point.replicated / point.halo:.2f}" if point.halo else "",
            )


# The page

PAGE = ROOT / "docs" / "scaling.md"
BEGIN = "<!-- begin: {}, by python -m benchmarks distributed --table -->\n"
NOTHING = "No run on GPUs is in `benchmarks/results` yet.\n"
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
    """Write both blocks of the page from the results of a folder."""
    for name, text in blocks(runs_of(folder)).items():
        write_block(PAGE, BEGIN.format(name), text)


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the sections of each run on GPUs."""
    paths = [folder / name for name in FILES]
    return [json.loads(path.read_text())["sections"] for path in paths if path.exists()]


def blocks(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each block of the page."""
    marks = ["---:"] * len(HEAD)
    tables = [f"**{one.name}**\n\n{markdown(HEAD, marks, *rows(one))}" for one in SCENARIOS]
    return {"measured": measured(runs), "extrapolated": "\n".join(tables)}


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
    return f"{what} on {where}:\n\n{markdown(heads, marks, *cells)}"
