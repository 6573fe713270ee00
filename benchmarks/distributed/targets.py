"""What training over ranks is to reach."""

from typing import Any

from .._harness import Target

ALONE, HIDDEN, MAXK, PREDICTED = 1.03, 0.5, 0.2, 1.15
#: Speed-up on GPUs, by graph, model and ranks: on 2 ranks in every order, else as ``_as_stated``.
SPEED_UP = {
    ("reddit", "sage", 2): 1.8,
    ("products", "sage", 2): 1.8,
    ("reddit", "sage", 4): 3.2,
    ("products", "sage", 4): 3.2,
    ("reddit", "gat", 4): 3.0,
    ("reddit", "maxk", 4): 2.6,
}
CASES = {key[:2] for key in SPEED_UP}


def of_steps(rows: list[dict[str, Any]]) -> list[Target]:
    """Judge speed-up over one device, hidden exchange and prediction; one rank beside no group."""
    found = []
    for row in rows:
        if "ms" in row:
            found += _alone(row) if row["ranks"] == 1 else _shared(row)
    return found


def _alone(row: dict[str, Any]) -> list[Target]:
    stated = row["graph"] in ("reddit", "products") and "peak_mib" in row
    limit = ALONE if stated else None
    return [Target(f"{row['case']}, over none", row["over_plain"], limit, at_least=False)]


def _shared(row: dict[str, Any]) -> list[Target]:
    case, ranks, on_gpus = row["case"], row["ranks"], "peak_mib" in row
    limit = SPEED_UP.get((row["graph"], row["model"], ranks)) if on_gpus else None
    if ranks > 2 and not _as_stated(row):
        limit = None
    found = [Target(f"{case}, speed-up", row["speed_up"], limit)]
    if "hidden" in row:
        stated = limit is not None and ranks == 2
        found.append(Target(f"{case}, exchange hidden", row["hidden"], HIDDEN if stated else None))
    ratio = row["predicted_ms"] / row["ms"]
    found.append(Target(f"{case}, predicted over measured", ratio))
    if on_gpus and ranks in (2, 4) and (row["graph"], row["model"]) in CASES and _as_stated(row):
        name = f"{case}, predicted and measured, larger over smaller"
        found.append(Target(name, max(ratio, 1 / ratio), PREDICTED, at_least=False))
    return found


def _as_stated(row: dict[str, Any]) -> bool:
    """Tell whether a case is in the order that targets mean: of products ids as generated."""
    return row["graph"] != "products" or row["order"] == "shuffled"


def of_exchange(rows: list[dict[str, Any]]) -> list[Target]:
    """Judge bytes beside those predicted, and of MaxK beside those of dense rows."""
    found = []
    for row in rows:
        if row["predicted_mib"]:
            ratio = row["sent_mib"] / row["predicted_mib"]
            found.append(Target(f"{row['case']}, bytes over predicted", ratio))
        if "over_dense" in row:
            name = f"{row['case']}, bytes over dense"
            found.append(Target(name, row["over_dense"], MAXK, at_least=False))
    return found
