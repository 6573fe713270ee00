"""Where steps are captured: on the CPU, by a stand-in for CUDA's recorder, and on a GPU."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch import optim  # noqa: E402

from sparsefmt.model import capturing  # noqa: E402


class Fake:
    """A recorder without CUDA."""

    device = torch.device("cpu")
    capturing = staticmethod(lambda: False)
    aside = strictly = staticmethod(nullcontext)
    follow = staticmethod(lambda: None)

    def record(self, run, generators):
        assert all(one.device == self.device for one in generators)
        # Who calls knows the parameters, as a graph would.
        self.run, self.results = run, run()
        self.of = [p for _, p in run.__self__._state.parameters]
        self.ends = [p.grad for p in self.of]
        return self, self.results

    def replay(self):
        for into, one in zip(self.results, self.run(), strict=True):
            if into is not None:
                into.copy_(one)
        for p, end in zip(self.of, self.ends, strict=True):
            if end is not None and p.grad is not end:
                end.copy_(p.grad)


@pytest.fixture(params=["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """Where a step is captured: on the CPU, by the recorder above, and on a GPU."""
    if request.param == "fake":
        monkeypatch.setattr(capturing, "_recorder", lambda *_: Fake())
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def recorded(request, monkeypatch):
    """Where a step is recorded, and not only called."""
    if request.param == "fake":
        monkeypatch.setattr(capturing, "_recorder", lambda *_: Fake())
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def may_run_uncaptured(monkeypatch):
    """Optimizers that are capturable warn of eager steps on a GPU."""
    monkeypatch.setattr(
        optim.Optimizer, "_warned_capturable_if_run_uncaptured", True, raising=False
    )
