"""What capturing asks of CUDA: a side stream, runs that may not wait, and a graph to replay."""

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch

from ..errors import SparseFmtError, UnsupportedError

#: Packages whose lines no user wrote.
_LIBRARIES = {"torch", "sparsefmt", "cupy", "cupy_backends", "contextlib", "functools"}
_WAITS = (
    "{line} waits for the GPU, or makes a tensor of numbers of the CPU, which no CUDA graph can: "
    "keep results on the GPU (no item(), float(), print or cpu() of a tensor, no boolean mask as "
    "an index, no torch.tensor(...) of numbers), and return them from step instead."
)


class Recorder:
    """A stream of one device, on which runs warm up and are recorded."""

    def __init__(self, device: torch.device, pool: Any, mode: str) -> None:
        self.device, self._mode = device, mode
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream: Any = None

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the side stream, after all that was launched and before all that will be."""
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        before = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """Refuse what waits for the GPU, by the line that does."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():  # it says that it does not see all waits
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            yield
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            raise UnsupportedError(_WAITS.format(line=_line(error.__traceback__))) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def record(self, run: Callable[[], Any], generators: list[Any]) -> tuple[Any, Any]:
        """Record a run, and give the graph and what the run returned."""
        gc.collect()  # nodes of autograd in cycles stay with other streams
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": self._mode}
        with warnings.catch_warnings():  # a step that is refused at once leaves an empty graph
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            try:
                with torch.cuda.graph(graph, **options):
                    found = run()
            except RuntimeError as error:
                raise self._told(error) from error
        return graph, found

    def _told(self, error: BaseException) -> Exception:
        """Say which line a capture stopped at, from the first of the errors that followed."""
        while error.__context__ is not None:
            error = error.__context__
        if isinstance(error, SparseFmtError) or "captur" not in str(error):
            return error if isinstance(error, Exception) else RuntimeError(str(error))
        self._mend()
        said = str(error).partition("\n")[0]
        return UnsupportedError(f"{_WAITS.format(line=_line(error.__traceback__))} CUDA: {said}.")

    def _mend(self) -> None:
        """Leave a capture that CUDA broke off: memory and random numbers stay in it."""
        with suppress(RuntimeError):  # torch has left it
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            torch.zeros(1, device=self.device)


def _line(trace: TracebackType | None) -> str:
    """Name the last line that is no library's."""
    found = "step"
    for frame, line in traceback.walk_tb(trace):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            found = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name},"
    return found
