"""What capturing asks of CUDA: a side stream, runs that may not wait, and a graph to replay."""

import gc
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn

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

    def __init__(self, device: torch.device, pool: tuple[int, int] | None, mode: str) -> None:
        self.device, self._mode = device, mode
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream: Any = None
        self._last: Any = None  # the stream of the latest replay

    def capturing(self) -> bool:
        """Return True while the current stream is captured."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run on a side stream, after earlier launches and ahead of later ones."""
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        before = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    def follow(self) -> None:
        """Let the current stream wait for that of the replay before, whose memory it reads."""
        now = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != now:
            now.wait_stream(self._last)
        self._last = now

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """Raise for a call that waits for the GPU, and name its line.

        Of the whole process: where other threads may wait meanwhile, the recorded run tells.
        """
        if self._mode != "global":
            yield
            return
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
        """Run a function as a CUDA graph; return the graph and the function's result."""
        gc.collect()  # nodes of autograd in cycles stay with other streams
        graph, outside = torch.cuda.CUDAGraph(), sys.exception()
        stopped: list[Any] = []  # the error that leaves the run
        for generator in generators:
            graph.register_generator_state(generator)
        options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": self._mode}
        with warnings.catch_warnings():  # a step that is refused at once leaves an empty graph
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            try:
                with torch.cuda.graph(graph, **options), ExitStack() as stack:
                    stack.push(lambda kind, error, trace: stopped.append(error))
                    result = run()
            except RuntimeError as error:
                self._refuse(next(iter(stopped), None) or error, error, outside)
        return graph, result

    def _refuse(
        self, cause: BaseException, error: Exception, outside: BaseException | None
    ) -> NoReturn:
        """Raise the error that stopped the run, with its line if CUDA did; ``error`` may follow."""
        of_cuda = [
            error
            for error in _chain(cause, outside)
            if "captur" in str(error) and not isinstance(error, SparseFmtError)
        ]
        if of_cuda or error is not cause:  # take allocator and generators out of a broken capture
            with suppress(RuntimeError):  # torch has left it
                torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                torch.zeros(1, device=self.device)
        if not of_cuda:
            raise cause from cause.__cause__
        line, said = _line(of_cuda[-1].__traceback__), str(of_cuda[-1]).partition("\n")[0]
        raise UnsupportedError(f"{_WAITS.format(line=line)} CUDA: {said}.") from cause


def _chain(error: BaseException, outside: BaseException | None) -> list[BaseException]:
    """Return an error and those that it followed, the first of them last, up to ``outside``."""
    errors = [error]
    while (before := errors[-1].__context__) is not None and before is not outside:
        errors.append(before)
    return errors


def _line(trace: TracebackType | None) -> str:
    """Return the last line that is no library's."""
    place = "step"
    for frame, line in traceback.walk_tb(trace):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            place = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name},"
    return place
