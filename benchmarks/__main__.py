"""Run one benchmark by name: ``python -m benchmarks convert``."""

import sys
from importlib import import_module
from pathlib import Path

NAMES = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def main(argv: list[str]) -> int:
    """Dispatch to ``benchmarks.NAME.main``."""
    if not argv or argv[0] not in NAMES:
        print(f"usage: python -m benchmarks {{{','.join(NAMES)}}} [options]", file=sys.stderr)
        return 2
    return int(import_module(f"benchmarks.{argv[0]}").main(argv[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
