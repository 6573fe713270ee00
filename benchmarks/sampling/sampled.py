"""SpMM over a sample of each row: speed, sampling rates, and the accuracy of models with it.

``python -m benchmarks sampled [--device cpu|cuda] [--sections table,models]
[--graphs reddit,path.npz] [--widths 128] [--sample 16,64] [--strategies bucket,random]
[--dtypes float32,bfloat16] [--data FOLDER] [--quick] [--out FOLDER]``

The sections are

- ``table``: ``spmm_sampled`` against cuSPARSE's best float32 SpMM of the whole graph, and ``spmm``;
- ``rates``: the share of the entries that is kept, over graphs: Table IV of ES-SpMM;
- ``models``: accuracy and time of trained GCNs over samples, with a plot: its Figs. 8 and 10, and
  Table V;
- ``training``: GCNs trained over samples drawn anew each time, beside training on whole graphs.

All run, on the CPU all but ``table``, unless ``--sections`` says otherwise; ``--widths`` are those
of features in ``table``, ``--sample`` entries kept of each row.  Real graphs are read from the
``.npz`` files of ``--data``, by default ``$SPARSEFMT_DATA`` or else ``../shared/data`` beside the
checkout; those that are missing are skipped with a line.  Products are checked in float64 at
sampled rows, against ``sample(...)``, whose entries are checked too; models in float64 by
torch.sparse.  Medians of 20 runs after 5, of 10 after 3 where one takes over 50 ms.
"""

import argparse
import os
from pathlib import Path

from .. import _baselines, _options

SECTIONS = {
    "table": ("sampling.table", "table"),
    "rates": ("sampling.rates", "rates"),
    "models": ("sampling.models", "models"),
    "training": ("sampling.training", "training"),
}
ON_GPU = {"table"}
STRATEGIES = ("bucket", "fastrand", "random")
DTYPES = ("float32", "float16", "bfloat16")
ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    options = parse(argv)
    on_cpu = options.device == "cpu"
    options.facts = {"threads": _baselines.use_threads(options.threads)} if on_cpu else {}
    return _options.run(SECTIONS, options)


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; what a section decides is None by default."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks sampled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _options.add_options(parser)
    known = {"sections": SECTIONS, "strategies": STRATEGIES, "dtypes": DTYPES}
    for name, names in known.items():
        split = _options.some_of(names)
        parser.add_argument(f"--{name}", type=split, help="of " + ", ".join(names))
    help = "entries kept of each row, such as 16,64"
    parser.add_argument("--sample", type=_options.widths, help=help)
    data = Path(os.environ.get("SPARSEFMT_DATA", ROOT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder of the real graphs")
    options = _options.parse(parser, argv)
    on_cpu = options.device == "cpu"
    if options.sections is None:
        options.sections = tuple(name for name in SECTIONS if not (on_cpu and name in ON_GPU))
    for name in options.sections:
        if on_cpu and name in ON_GPU:
            parser.error(f"{name} needs a GPU")
    return options
