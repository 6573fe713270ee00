"""Training over several GPUs: speed-up, what is exchanged and hidden, and a model that predicts it.

``python -m benchmarks distributed [--ranks 1,2] [--device cpu|cuda] [--graphs reddit,products]
[--models sage,gat,maxk] [--orders community,shuffled] [--sections steps,bandwidth,exchange,large]
[--quick] [--out FOLDER] [--table]``

One process for each GPU, joined by NCCL, or by gloo on the CPU; all numbers of ranks in one run.
The sections are

- ``bandwidth``: ``all_to_all_single`` and ``all_reduce`` alone, GiB/s out of a rank;
- ``steps``: a training step (forward, loss, backward, sum of gradients, Adam) of three layers,
  hidden width 256, beside the same layers on one GPU without a process group.  Losses of the first
  three steps and the first gradients are compared with those of one GPU before anything is timed.
  Also the step without its exchanges and the exchanges without the step, which give the share of
  the exchange that is hidden, ``1 - (step - silent) / exchange``; and what the model predicts;
- ``exchange``: the halo of each partition, and the bytes that a rank sends in a step, counted at
  ``torch.distributed``, beside those predicted;
- ``large``: 2.5 times products, as wide as does not fit one GPU, on all of them.

``--table`` runs nothing: it writes the table of ``docs/scaling.md`` and its plot from the results.
"""

import argparse
from importlib import import_module

from .. import _harness, _options
from .ranks import Ranks, start

NAMES = ("bandwidth", "steps", "exchange", "large")
MODELS, ORDERS = ("sage", "gat", "maxk"), ("community", "shuffled")


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    options = parse(argv)
    if options.table:
        import_module(".table", __package__).write(options.out or _harness.RESULTS)
        return 0
    return 0 if start(work, options) else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; ``graphs``, ``models`` and ``orders`` are None where a section decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks distributed")
    _options.add_options(parser)
    parser.add_argument("--ranks", type=_options.widths, default=(1, 2), help="such as 1,2,4")
    parser.add_argument("--models", type=_options.some_of(MODELS), help=", ".join(MODELS))
    parser.add_argument("--orders", type=_options.some_of(ORDERS), help="of the vertices")
    parser.add_argument("--sections", type=_options.some_of(NAMES), help=", ".join(NAMES))
    table = "write the table and the plot of docs/scaling.md, and run nothing"
    parser.add_argument("--table", action="store_true", help=table)
    options = parser.parse_args(argv) if "--table" in argv else _options.parse(parser, argv)
    if options.widths:
        parser.error("the width is 256")
    if options.device == "cpu" and "large" in (options.sections or ()):
        parser.error("large needs GPUs")
    if options.device == "cuda" and not options.table:
        import torch

        if max(options.ranks) > torch.cuda.device_count():
            parser.error(f"{max(options.ranks)} ranks need as many GPUs: --ranks 1,2 needs 2")
    if options.sections is None:
        options.sections = [one for one in NAMES if options.device == "cuda" or one != "large"]
    return options


def work(ranks: Ranks, options: argparse.Namespace) -> bool:
    """Run the sections, in one of the processes."""
    from .bandwidth import bandwidth
    from .training import training

    right = True
    if "bandwidth" in options.sections:
        right &= bandwidth(ranks, options)
    if {"steps", "exchange"} & set(options.sections):
        right &= training(ranks, options)
    if "large" in options.sections:
        right &= import_module(".large", __package__).large(ranks, options)
    return right
