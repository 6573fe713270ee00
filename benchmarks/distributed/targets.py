"""What training over ranks is to reach."""

from typing import Any

from .._harness import Target

SPEED_UP, ALONE, HIDDEN, MAXK = 1.8, 1.03, 0.5, 0.2
#: Graphs that the speed-up is stated for, on GPUs, with GraphSAGE on two ranks.
GRAPHS = ("reddit", "products")


def of_steps(rows: list[dict[str, Any]]) -> list[Target]:
    """Speed-up over one device, one rank beside no group, and the hidden part of the exchange."""
    found = []
    for row in rows:
        if "ms" not in row:
            continue
        case, stated = row["case"], row["graph"] in GRAPHS and "peak_mib" in row
        if row["ranks"] == 1:
            limit = ALONE if stated else None
            found.append(Target(f"{case}, over none", row["over_plain"], limit, at_least=False))
            continue
        stated = stated and row["ranks"] == 2 and row["model"] == "sage"
        found.append(Target(f"{case}, speed-up", row["speed_up"], SPEED_UP if stated else None))
        if "hidden" in row:
            limit = HIDDEN if stated else None
            found.append(Target(f"{case}, exchange hidden", row["hidden"], limit))
        ratio = row["predicted_ms"] / row["ms"]
        found.append(Target(f"{case}, predicted over measured", ratio))
    return found


def of_exchange(rows: list[dict[str, Any]]) -> list[Target]:
    """Bytes beside those predicted; of MaxK beside those of dense rows."""
    found = []
    for row in rows:
        if row["predicted_mib"]:
            ratio = row["sent_mib"] / row["predicted_mib"]
            found.append(Target(f"{row['case']}, bytes over predicted", ratio))
        if "over_dense" in row:
            name = f"{row['case']}, bytes over dense"
            found.append(Target(name, row["over_dense"], MAXK, at_least=False))
    return found
