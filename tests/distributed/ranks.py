"""Processes that run the cases of the tests, each on some of them as ranks of a group.

Started once: to import torch takes longer than all cases.
"""

import sys
import tempfile
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MOST = 8
#: How long ranks wait for one that has failed.
PATIENCE = timedelta(seconds=60)


class Ranks:
    """Processes that wait for cases."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._ask = [context.SimpleQueue() for _ in range(MOST)]
        self._answers = context.SimpleQueue()
        path = Path(self._folder.name) / "store"
        self._processes = [
            context.Process(target=_serve, args=(rank, path, ask, self._answers), daemon=True)
            for rank, ask in enumerate(self._ask)
        ]
        for process in self._processes:
            process.start()

    def run(self, ranks: int, case: Any, *arguments: Any) -> list[Any]:
        """Run ``case(group, *arguments)`` on the first ranks; what each of them returns."""
        name = case.__module__, case.__name__
        for ask in self._ask:
            ask.put((ranks, name, arguments))
        found: list[Any] = [None] * ranks
        wrong = []
        for _ in range(MOST):
            rank, error, value = self._answers.get()
            if error:
                wrong.append(f"rank {rank}:\n{error}")
            elif rank < ranks:
                found[rank] = value
        assert not wrong, "\n".join(wrong)
        return found

    def close(self) -> None:
        """End the processes."""
        for ask in self._ask:
            ask.put(None)
        for process in self._processes:
            process.join(10)
        self._folder.cleanup()


def _serve(rank: int, path: Path, ask: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=MOST,
        timeout=PATIENCE,
    )
    groups: dict[int, Any] = {}
    while (asked := ask.get()) is not None:
        ranks, (module, name), arguments = asked
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(range(ranks)), timeout=PATIENCE)
        value, error = None, ""
        if rank < ranks:
            try:
                value = getattr(import_module(module), name)(groups[ranks], *arguments)
            except BaseException:
                error = traceback.format_exc()
        answers.put((rank, error, value))
    dist.destroy_process_group()
