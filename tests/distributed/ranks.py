"""Processes that run the cases of the tests, each on some of them as ranks of a group.

Started once, on the CPU as copies of a process that has imported what cases need: to import torch
takes longer than all cases.
"""

import inspect
import os
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rare_loops import install_if_told

from sparsefmt import autograd, distributed, nn, ops

#: How long ranks wait for one that has failed.
PATIENCE = timedelta(seconds=60)


def imported_before() -> list[str]:
    """Modules that most cases need, numba's loops among them."""
    rooms = sorted(Path(ops.__file__).parent.glob("*/cpu.py"))
    modules = [
        f"{package.__name__}.{module.name}"
        for package in (autograd, nn, distributed)
        for module in iter_modules(package.__path__)
    ]
    modules += ["torch.fx.experimental.symbolic_shapes", "pytest"]  # and sympy with the first
    return [*modules, *(f"sparsefmt.ops.{room.parent.name}.cpu" for room in rooms)]


def free_port() -> int:
    """Return the number of a port that nobody listens to."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def forked(target: Any, *arguments: Any) -> Any:
    """Start a process, a copy of one that has imported what cases need."""
    # CUDA does not survive a fork, whoever has called it.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(imported_before())
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def spawned(target: Any, *arguments: Any) -> Any:
    """Start a process that imports all itself."""
    process = mp.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def on_ranks(*counts: int) -> Any:
    """Make a test of a function of a group: it is run on the ranks of groups of these sizes.

    What it asserts holds on each rank; what it returns, all ranks must return alike.
    """

    def make(case: Any) -> Any:
        _, *given = inspect.signature(case).parameters.values()

        def test(ranks: Ranks, **arguments: Any) -> None:
            for count in counts:
                first, *others = ranks.run(count, case, *(arguments[one.name] for one in given))
                assert all(one == first for one in others)

        pool = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([pool, *given])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = case.__name__, case.__doc__, case.__module__
        test.case = case  # type: ignore[attr-defined]
        return test

    return make


class Ranks:
    """Processes that wait for cases: on the CPU joined by gloo, or by NCCL with a GPU each."""

    def __init__(self, most: int = 8, device: str = "cpu") -> None:
        self._most, self._device = most, device
        self._lines, self._processes = [], []
        self._start()

    def _start(self) -> None:
        start = forked if self._device == "cpu" else spawned
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "store"
        for rank in range(self._most):
            line, theirs = mp.Pipe()
            self._processes.append(start(_serve, rank, self._most, self._device, path, theirs))
            theirs.close()  # so that its end is seen here
            self._lines.append(line)

    def run(self, ranks: int, case: Any, *arguments: Any) -> list[Any]:
        """Run ``case(group, *arguments)`` on the first ranks; what each of them returns."""
        case = getattr(case, "case", case)
        name = case.__module__, case.__name__
        if not all(process.is_alive() for process in self._processes):  # NCCL ends them
            self.close()
            self._start()
        for line in self._lines:
            line.send((ranks, name, arguments))
        found: list[Any] = []
        wrong = []
        for rank, line in enumerate(self._lines):
            try:
                error, value = line.recv()
            except (EOFError, OSError):
                error, value = "its process is gone", None
            if error:
                wrong.append(f"rank {rank}:\n{error}")
            found.append(value)
        assert not wrong, "\n".join(wrong)
        return found[:ranks]

    def close(self) -> None:
        """End the processes."""
        for line in self._lines:
            with suppress(OSError):  # it has ended already
                line.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._lines, self._processes = [], []
        self._folder.cleanup()


def _serve(rank: int, most: int, device: str, path: Path, line: Any) -> None:
    torch.set_num_threads(1)
    install_if_told()
    sys.path.insert(0, str(Path(__file__).parent))
    if device == "cuda":
        # Multicast by NVLink can put the GPUs of a host that others share out of service.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=most,
        timeout=PATIENCE,
    )
    groups: dict[int, Any] = {}
    while (asked := line.recv()) is not None:
        ranks, (module, name), arguments = asked
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(range(ranks)), timeout=PATIENCE)
        value, error = None, ""
        if rank < ranks:
            try:
                found = getattr(import_module(module), name)
                value = getattr(found, "case", found)(groups[ranks], *arguments)
            except BaseException:
                error = traceback.format_exc()
        line.send((error, value))
    dist.destroy_process_group()
