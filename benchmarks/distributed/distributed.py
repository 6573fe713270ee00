"""Training over several GPUs: speed-up, what is exchanged and hidden, and a model that predicts it.

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

``--table`` runs nothing: it writes the tables of ``docs/scaling.md`` from the results.
"""

import argparse
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from .._graphs import known
from .._table import RESULTS, Benchmark, Limit, Row, Section, Target, keep, numbers
from .ranks import Ranks, start

NAMES = ("bandwidth", "steps", "exchange", "large")


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    if "--table" in argv:
        parser = argparse.ArgumentParser(prog="python -m benchmarks distributed --table")
        parser.add_argument("--table", action="store_true")
        parser.add_argument("--out", type=Path, default=RESULTS)
        import_module(".table", __package__).write(parser.parse_args(argv).out)
        return 0
    options = BENCHMARK.parse(argv)
    options.ranks = options.ranks or (1, 2)
    for name in options.graphs or ():
        if not known(name) and not Path(name).exists():
            print(f"{name} is neither a file nor a graph of benchmarks/_graphs.py", file=sys.stderr)
            return 2
    if options.cuda:
        import torch

        if max(options.ranks) > torch.cuda.device_count():
            message = f"{max(options.ranks)} ranks need as many GPUs: --ranks 1,2 needs 2"
            print(message, file=sys.stderr)
            return 2
    return 0 if start(work, options) else 1


def work(ranks: Ranks, options: argparse.Namespace) -> bool:
    """Run the sections, in one of the processes."""
    from .training import bandwidth, large, training

    options.keep = partial(_keep, options)
    right = True
    if "bandwidth" in options.sections:
        right &= bandwidth(ranks, options)
    if {"steps", "exchange"} & set(options.sections):
        right &= training(ranks, options)
    if "large" in options.sections:
        right &= large(ranks, options)
    return right


def _keep(
    options: argparse.Namespace, section: str, rows: list[Row], limits: tuple[Limit, ...]
) -> bool:
    def judge(rows: list[Row]) -> list[Target]:
        return [one for limit in limits for one in limit.targets(rows, options.device)]

    return keep(BENCHMARK, section, rows, judge, cuda=options.cuda, folder=options.out)


#: Their rows come of several processes: see ``work``.
SECTIONS = {name: Section(lambda _: iter(()), only="cuda" * (name == "large")) for name in NAMES}
BENCHMARK = Benchmark("distributed", __doc__, SECTIONS, {"ranks": numbers})
BENCHMARKS = {"distributed": main}
