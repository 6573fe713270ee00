"""Run one benchmark by name: ``python -m benchmarks convert``."""

import sys
from importlib import import_module
from typing import Any

from sparsefmt.errors import DeviceError

from . import _report

#: Name of a benchmark -> the room with its module, which has the same name and a ``main``.
ROOMS = {
    "convert": "formats",
    "digests": "engine",
    "distributed": "distributed",
    "fuse": "attention",
    "maxk": "cbsr",
    "messages": "messages",
    "overhead": "engine",
    "plan": "plan",
    "rgcn": "relations",
    "sampled": "sampling",
    "sddmm": "edges",
    "softmax": "edges",
    "spmm": "matmul",
    "tcgnn": "tiles",
    "tiles": "tiles",
    "wallclock": "wallclock",
}


#: Commands over all benchmarks.
COMMANDS = {"all": _report.run_all, "report": _report.report, "compare": _report.compare}


def main(argv: list[str]) -> int:
    """Dispatch to ``benchmarks.ROOM.NAME.main``."""
    asked = bool(argv) and argv[0] in ("-h", "--help")
    if not argv or argv[0] not in {*ROOMS, *COMMANDS}:
        out = sys.stdout if asked else sys.stderr
        print("usage: python -m benchmarks NAME [options]; NAME --help lists them\n", file=out)
        for name in ROOMS:
            print(f"  {name:10} {_module(name).__doc__.splitlines()[0]}", file=out)
        for name, command in COMMANDS.items():
            print(f"  {name:10} {(command.__doc__ or '').splitlines()[0]}", file=out)
        return 0 if asked else 2
    try:
        if argv[0] in COMMANDS:
            return COMMANDS[argv[0]](argv[1:])
        return int(_module(argv[0]).main(argv[1:]) or 0)
    except DeviceError as error:
        mend = (
            ""
            if argv[0] in ROOMS and getattr(_module(argv[0]), "NEEDS_GPU", False)
            else " Or give --device cpu."
        )
        print(f"{error}{mend}", file=sys.stderr)
        return 2


def _module(name: str) -> Any:
    return import_module(f"benchmarks.{ROOMS[name]}.{name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
