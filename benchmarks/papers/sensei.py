"""SENSEi (arXiv 2306.15155): the composition of a layer's products, chosen by graph and sizes.

- ``grid``: GCN and GAT, what ``optimize`` chose beside the default composition and the fastest;
- ``samples``: planned on one sample of a graph, measured on another (figure 9);
- ``layers``: GraphSAGE, GIN, SGConv and TAGConv (figure 10);
- ``fixed``: what choosing by hardware, by widths or by graph alone would give (table 4), from the
  times of the grid.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from .. import plan
from .._table import RESULTS, Benchmark, Limit, Row, Section, geomean
from ._paper import Claim, Panel, Paper

#: What a choice may look at -> the columns that tell its cases apart.
KNOWN: dict[str, tuple[str, ...]] = {
    "hardware": ("model", "kind"),
    "widths": ("model", "kind", "widths"),
    "graph": ("model", "kind", "graph"),
}


def fixed(options: argparse.Namespace) -> Iterator[Row]:
    """Yield what one composition for all cases that look alike reaches of the fastest."""
    path = (options.out or RESULTS) / f"papers-sensei-{'gpu' if options.cuda else 'cpu'}.json"
    sections = json.loads(path.read_text())["sections"] if path.exists() else {}
    rows = sections.get("grid", {}).get("rows", [])
    for known, columns in KNOWN.items():
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(str([row[name] for name in columns]), []).append(row)
        reached = [share for group in groups.values() for share in best(group)]
        if reached:
            yield {"case": f"by {known}", "of_oracle": geomean(reached), "cells": len(reached)}
    if rows:
        chosen = geomean(row["of_oracle"] for row in rows)
        yield {"case": "by all of them", "of_oracle": chosen, "cells": len(rows)}


def best(group: list[Row]) -> list[float]:
    """Return the shares of the fastest that the best one composition reaches in each case."""
    common = set.intersection(*(set(row["compositions"]) for row in group))
    shares = [
        [min(row["compositions"].values()) / row["compositions"][name] for row in group]
        for name in sorted(common)
    ]
    return max(shares, key=geomean, default=[])


def of(model: str, kind: str) -> Callable[[Row], bool]:
    """Return the test of a row for a model in inference or training."""
    return lambda row: (row["model"], row["kind"]) == (model, kind)


SECTIONS = {
    "grid": plan.SECTIONS["grid"],
    "samples": replace(plan.SECTIONS["samples"], default=True),
    "layers": plan.SECTIONS["layers"],
    "fixed": Section(fixed, (Limit("of_oracle", "each"),)),
}
OVER = "over_default"
PAPER = Paper(
    Benchmark("papers-sensei", __doc__, SECTIONS, plan.EXTRA),
    (
        Claim("GCN inference over the default", "1.17", "grid", OVER, of("gcn", "inference")),
        Claim("GCN training over the default", "1.04", "grid", OVER, of("gcn", "training")),
        Claim("GAT inference over the default", "1.5", "grid", OVER, of("gat", "inference")),
        Claim("GAT training over the default", "1.61", "grid", OVER, of("gat", "training")),
        Claim("share of the fastest composition", "", "grid", "of_oracle"),
    ),
    (
        Panel("grid", OVER, "chosen over the default, times faster"),
        Panel("grid", "of_oracle", "share of the fastest composition"),
        Panel("fixed", "of_oracle", "chosen by one property alone"),
    ),
)
