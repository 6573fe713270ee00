"""Run one benchmark by name, or all: ``python -m benchmarks convert``."""

import json
import sys
from collections.abc import Callable
from importlib import import_module

from sparsefmt.errors import DeviceError

#: Name of a benchmark -> the module whose ``BENCHMARKS`` has it, and what it measures.
ROOMS = {
    "convert": ("formats", "conversions against SciPy and cupyx"),
    "tiles": ("formats", "tiles that condensing saves: the table of docs/formats.md"),
    "digests": ("engine.digests", "every result bit by bit, to compare two versions"),
    "overhead": ("engine.overhead", "what a call costs the host, and replays of CUDA graphs"),
    "spmm": ("matmul", "A @ X against cuSPARSE and what else people use"),
    "sddmm": ("edges", "dot products at the entries against cuSPARSE and PyG"),
    "softmax": ("edges", "softmax over the entries of rows against PyG and a copy"),
    "maxk": ("cbsr", "MaxK, SpGEMM and SSpMM against torch.topk and SpMM"),
    "fuse": ("attention", "attention and aggregation with gradients against PyG and cuSPARSE"),
    "tcgnn": ("tiles", "products by tiles on tensor cores against cuSPARSE"),
    "sampled": ("sampling", "products over samples of rows against cuSPARSE"),
    "messages": ("layers", "messages with features of edges against PyG"),
    "rgcn": ("layers", "RGCNConv against PyG"),
    "training": ("training", "an epoch of each paper's models against its peer"),
    "plan": ("plan", "compositions that optimize chooses, against the fastest"),
    "wallclock": ("wallclock", "wall time of training steps against PyG"),
    "papers": ("papers", "what five papers claim beside what is measured here"),
    "distributed": ("distributed.distributed", "training over several GPUs, and a prediction"),
}
COMMANDS = {
    "all": "run everything that one device can",
    "report": "write docs/results.md from the results that are kept",
    "compare": "print what is slower in B.json than in A.json",
}


def main(argv: list[str]) -> int:
    """Run the benchmark or command of that name with the other arguments."""
    asked = bool(argv) and argv[0] in ("-h", "--help")
    if not argv or argv[0] not in {*ROOMS, *COMMANDS}:
        out = sys.stdout if asked else sys.stderr
        print("usage: python -m benchmarks NAME [options]; NAME --help lists them\n", file=out)
        texts = {name: text for name, (_, text) in ROOMS.items()} | COMMANDS
        for name, text in texts.items():
            print(f"  {name:11} {text}", file=out)
        return 0 if asked else 2
    try:
        return command(argv[0])(argv[1:])
    except DeviceError as error:
        print(f"{error} Or give --device cpu.", file=sys.stderr)
    except (OSError, json.JSONDecodeError) as error:  # a file that is not there, or is no JSON
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 2


def command(name: str) -> Callable[[list[str]], int]:
    """Return the benchmark or command of that name."""
    room = ROOMS[name][0] if name in ROOMS else "_report"
    result: Callable[[list[str]], int] = import_module(f"benchmarks.{room}").BENCHMARKS[name]
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
