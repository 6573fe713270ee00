"""Whether a planned model waits for its host to launch kernels, so that a captured step is faster.

``optimize`` captures nothing by itself: it does not know the loss and the optimizer of the step.
"""

from dataclasses import dataclass

from .composition import times_of
from .tiling import TimedStep

#: Share of a step's time that its launches take on the host, from which the device waits for them.
LEAST_SHARE = 0.8
RUNS = 3


@dataclass(frozen=True)
class Launching:
    """Whether the step would be faster as a CUDA graph, and why."""

    reason: str
    pays: bool = False
    measured: tuple[float, float] | None = None  #: seconds of the host alone, and of the whole step

    def explain(self) -> str:
        """Write what was found in one paragraph."""
        lines = [f"capture: {self.reason}"]
        if self.measured:
            host, whole = (seconds * 1e3 for seconds in self.measured)
            lines.append(f"  measured: {host:.3f} ms of launches in a step of {whole:.3f} ms")
        return "\n".join(lines)


def decide(step: TimedStep) -> Launching:
    """Time what the host takes to launch a step, beside the step."""
    if step.like is None:
        return Launching("not decided, since the model was not called with features")
    if not step.like.is_cuda:
        return Launching("none, since the features are on the CPU, which launches nothing")
    with step.mode():
        host, whole = min((times_of(step.run, step.like) for _ in range(RUNS)), key=lambda t: t[1])
    if host < LEAST_SHARE * whole:
        return Launching("not needed, since the device is busy meanwhile", False, (host, whole))
    return Launching(
        "pays, since the device waits for launches: sparsefmt.nn.capture(step, ...)",
        True,
        (host, whole),
    )
