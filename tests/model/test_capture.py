"""Captured steps against the same steps run eagerly.

On the CPU a recorder stands in for CUDA's: its replays run the step again, into the same results.
"""

import functools
import gc
import itertools
import weakref

import pytest

torch = pytest.importorskip("torch")

from capture_cases import (  # noqa: E402
    CLASSES,
    NETS,
    OPTIMIZERS,
    WIDTH,
    N,
    Trainer,
    assert_equal,
    batches,
    fit,
    left,
    ring,
    training,
)
from torch import optim  # noqa: E402
from torch.nn import Linear, Module  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.optim import SGD  # noqa: E402

from sparsefmt import Graph  # noqa: E402
from sparsefmt.autograd import as_graph  # noqa: E402
from sparsefmt.autograd.tensors.prepare import graph_tensors  # noqa: E402
from sparsefmt.model import capturing  # noqa: E402
from sparsefmt.nn import SAGEConv, capture  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "may_run_uncaptured")


def assert_trains_alike(name, optimizer, device, exactly=True):
    eager, captured = training(name, optimizer, device), training(name, optimizer, device)
    given = batches(device)
    call = capture(captured[2], *given[0])
    losses = [], []
    for way, step in enumerate((eager[2], call)):
        torch.manual_seed(3)
        for pair in given:
            losses[way].append(step(*pair).detach().clone())
    assert_equal(left(*captured[:2]), left(*eager[:2]), exactly)
    assert_equal(dict(enumerate(losses[1])), dict(enumerate(losses[0])), exactly)


@pytest.mark.covering("optimizer", "name", one_in=2)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", NETS)
def test_captured_steps_are_eager_steps(name, optimizer, recorded, request, monkeypatch):
    if recorded == "cpu":  # whose optimizers are not capturable
        monkeypatch.setattr(capturing.State, "refuse", lambda _: None)
    if recorded == "cuda" and name == "maxk":  # its gradient adds up by atomics
        request.getfixturevalue("deterministic")
    assert_trains_alike(name, optimizer, recorded)


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"sgd", "adam", "adamw"}))
def test_each_optimizer_starts_as_if_it_had_never_stepped(optimizer, recorded, monkeypatch):
    if recorded == "cpu":
        monkeypatch.setattr(capturing.State, "refuse", lambda _: None)
    assert_trains_alike("gcn", optimizer, recorded)


@pytest.mark.gpu
def test_a_step_with_atomics_passes_the_check():
    _, _, step = training("maxk", "sgd", "cuda")
    call = capture(step, *batches("cuda", 1)[0])
    assert call(*batches("cuda", 1)[0]).isfinite()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_capture_leaves_everything_as_it_was(name, before, recorded):
    model, optimizer, step = training(name, "sgd" if recorded == "cpu" else "adam", recorded)
    pairs = batches(recorded, 3)
    for pair in pairs[:before]:
        step(*pair)
    grads = [p.grad for p in model.parameters()]
    found, drawn = left(model, optimizer, before > 0), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if recorded == "cuda" else drawn
    capture(step, *pairs[2])
    assert_equal(left(model, optimizer, before > 0), found)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)
    if recorded == "cuda":
        assert torch.equal(torch.cuda.get_rng_state(), on_device)
    if not before:
        held = [v for one in optimizer.state.values() for v in one.values()]
        assert held
        assert not any(v.any() for v in held)


@pytest.mark.parametrize("name", ["gcn", "gat", "samples"])
def test_each_replay_draws_anew(name, place):
    model, _, _ = training(name, "sgd", place)
    graph = Graph.from_edge_index(ring(place), num_nodes=N)
    x = batches(place, 1)[0][0]

    def look(x):
        with torch.no_grad():
            return model(x, graph)

    call = capture(look, x)
    seen = [call(x).clone() for _ in range(10)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("name", NETS)
def test_inference_follows_its_inputs_and_the_weights(name, place):
    model, _, step = training(name, "sgd", place)
    graph = Graph.from_edge_index(ring(place), num_nodes=N)
    model.eval()

    @torch.no_grad()
    def infer(given):
        return {"y": [model(given["x"], graph)], "none": None}

    pairs = batches(place, 4)
    call = capture(infer, {"x": pairs[0][0]})
    for x, labels in pairs:
        found, expected = call({"x": x}), infer({"x": x})
        assert found["none"] is None
        assert torch.equal(found["y"][0], expected["y"][0])
        model.train()
        step(x, labels)
        model.eval()


@pytest.mark.parametrize("clone", [False, True])
def test_results_are_overwritten_unless_they_are_cloned(clone, recorded):
    call = capture(lambda x: x + 1, torch.zeros(3, device=recorded), clone=clone)
    first = call(torch.zeros(3, device=recorded))
    second = call(torch.ones(3, device=recorded))
    assert second.tolist() == [2, 2, 2]
    assert first.tolist() == ([1, 1, 1] if clone else [2, 2, 2])
    assert not first.requires_grad


@pytest.mark.parametrize("where", ["before", "keep", "after", "never", "outside"])
def test_gradients_are_those_of_eager_steps(where, recorded):
    """Wherever they are set to zero, and where they add up."""
    both = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Linear(WIDTH, CLASSES).to(recorded)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)

        def step(x, y, model=model, optimizer=optimizer):
            if where in ("before", "keep"):
                optimizer.zero_grad(set_to_none=where == "before")
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if where == "after":
                optimizer.zero_grad()
            return loss

        pairs = batches(recorded, 6)
        call = capture(step, *pairs[0]) if captured else step
        for pair in pairs:
            call(*pair)
            if where == "outside":
                optimizer.zero_grad()
        both.append(left(model, optimizer))
    assert_equal(both[1], both[0], exactly=recorded == "cpu")


def test_gradients_that_are_there_are_added_to(recorded):
    model = Linear(WIDTH, CLASSES).to(recorded)
    x, y = batches(recorded, 1)[0]
    cross_entropy(model(x), y).backward()
    given = model.weight.grad
    expected = 2 * given.clone()

    def step(x):
        cross_entropy(model(x), y).backward()

    call = capture(step, x)
    assert torch.allclose(2 * model.weight.grad, expected)
    assert call(x) is None
    assert model.weight.grad is given
    assert torch.allclose(given, expected)


@pytest.mark.parametrize("kind", ["method", "object", "partial", "lambda", "state", "list"])
def test_state_is_found_wherever_a_step_holds_it(kind, recorded):
    one = Trainer(recorded)
    model, optimizer = one.parts["model"], one.optimizer
    step = {
        "method": one.step,
        "object": one,
        "partial": functools.partial(fit, model, optimizer),
        "lambda": lambda x, y: one.step(x, y),
        "state": lambda x, y: one.step(x, y),
        "list": lambda x, y, held=[model, [optimizer]]: fit(held[0], held[1][0], x, y),
    }[kind]
    before = model.weight.detach().clone()
    x, y = batches(recorded, 1)[0]
    call = capture(step, x, y, state=(model, optimizer) if kind == "state" else None)
    assert torch.equal(model.weight, before)
    call(x, y)
    assert not torch.equal(model.weight, before)


def test_a_learning_rate_that_is_a_tensor_may_change(recorded):
    both = []
    for captured in (False, True):
        one = Trainer(recorded)
        lr = torch.tensor(0.1, device=recorded)
        fused = recorded == "cuda"
        one.optimizer = SGD(one.parts["model"].parameters(), lr=lr, fused=fused)
        schedule = optim.lr_scheduler.ExponentialLR(one.optimizer, 0.5)
        pairs = batches(recorded, 5)
        step = capture(one.step, *pairs[0]) if captured else one.step
        for pair in pairs:
            step(*pair)
            schedule.step()
        both.append(left(one.parts["model"], one.optimizer))
    assert_equal(both[1], both[0], exactly=recorded == "cpu")


def test_a_step_may_ask_what_its_arguments_are(recorded):
    model, x = Linear(WIDTH, CLASSES).to(recorded), torch.ones(N, WIDTH, device=recorded)

    def step(x):
        try:
            scale = 2 if type(x) is torch.Tensor and hasattr(x, "grad") and callable(model) else 1
        except TypeError:
            scale = 1
        with torch.no_grad():
            return model(x) * (scale if not torch.is_grad_enabled() else 1)

    torch.testing.assert_close(capture(step, x)(x), step(x))


@pytest.mark.gpu
def test_a_generator_of_ones_own_draws_anew():
    own = torch.Generator("cuda").manual_seed(5)
    x = torch.zeros(1000, device="cuda")
    call = capture(lambda x: x + torch.rand(1000, device="cuda", generator=own), x)
    found = [call(x).clone() for _ in range(3)]
    again = torch.Generator("cuda").manual_seed(5)
    for one in found:
        assert torch.equal(one, torch.rand(1000, device="cuda", generator=again))


@pytest.mark.gpu
def test_captures_may_share_memory():
    pool, x = torch.cuda.graph_pool_handle(), torch.rand(1000, device="cuda")
    calls = [capture(lambda x, k=k: x * k, x, pool=pool, clone=True) for k in (2, 3)]
    assert torch.equal(calls[0](x), 2 * x)
    assert torch.equal(calls[1](x), 3 * x)


@pytest.mark.gpu
def test_autocast_outside_of_a_step_follows_the_weights():
    one = Trainer("cuda")
    x, y = batches("cuda", 1)[0]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        call = capture(one.step, x, y)
        losses = [float(call(x, y)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_cpu_steps_are_called(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []
    x = torch.rand(3)
    call = capture(lambda x: seen.append(x) or x.sum(), x)
    assert not seen
    assert call(x) == x.sum()
    assert seen[0] is x


@pytest.mark.parametrize("given", ["graph", "edge_index"])
def test_a_graph_lives_as_long_as_what_reads_it(given, recorded):
    model = SAGEConv(WIDTH, CLASSES).to(recorded).requires_grad_(False)
    x, edges = batches(recorded, 1)[0][0], ring(recorded)
    held = {"graph": Graph.from_edge_index(edges, num_nodes=N), "edge_index": edges}
    call = capture(lambda x: model(x, held[given]), x)
    expected = call(x).clone()
    alive = weakref.ref(graph_tensors(as_graph(held[given], x)))
    if given == "edge_index":  # another graph is remembered in its place
        model(torch.rand(2 * N, WIDTH, device=recorded), edges)
    held.clear()
    gc.collect()
    assert alive() is not None
    if recorded == "cuda":  # the stand-in runs the step again, which needs the names
        trash = [torch.full((1000,), -1, device="cuda") for _ in range(1000)]
        torch.testing.assert_close(call(x), expected)
        del trash
    del call
    gc.collect()
    assert alive() is None


def test_what_a_module_shows_of_its_forward_may_change(recorded):
    class Shown(Module):
        last = None

        def forward(self, x):
            self.last = x * 2
            return x + 1

    x, model = torch.rand(4, 3, device=recorded), Shown()
    call = capture(model, x)
    assert model.last is None
    assert torch.equal(call(x), x + 1)


def test_a_failed_step_leaves_everything_as_it_was(recorded):
    class Failing(Module):
        def __init__(self):
            super().__init__()
            for name in "nk":
                self.register_buffer(name, torch.zeros(()))

        def forward(self, x):
            self.n.add_(1)
            self.k = self.k + 1
            raise ValueError("no forward")

    x, model = torch.rand(4, 3, device=recorded), Failing().to(recorded)
    buffers = dict(model.named_buffers())
    with pytest.raises(ValueError, match="no forward"):
        capture(model, x)
    assert all(model.get_buffer(name) is one and one == 0 for name, one in buffers.items())


def test_an_average_that_is_written_through_data_is_put_back(recorded):
    torch.manual_seed(0)
    model, average = (Linear(3, 3).to(recorded) for _ in range(2))
    before = average.weight.detach().clone()
    x = torch.rand(4, 3, device=recorded)

    def step(x):
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.data.mul_(0.9).add_(b.data, alpha=0.1)
        return average(x).detach()

    call = capture(step, x)
    assert torch.equal(average.weight, before)
    call(x)
    torch.testing.assert_close(average.weight, 0.9 * before + 0.1 * model.weight)


def test_a_capture_may_stand_where_an_error_was_caught(recorded):
    calls = {}
    x = torch.rand(4, 3, device=recorded)
    try:
        call = calls["step"]
    except KeyError:
        call = calls["step"] = capture(lambda x: x + 1, x)
    assert torch.equal(call(x), x + 1)


@pytest.mark.gpu
def test_calls_from_several_streams_follow_one_another():
    x = torch.rand(2000, 2000, device="cuda")
    call = capture(lambda x: x @ x @ x @ x, x, clone=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    given = [torch.full_like(x, float(k)) / 2000 for k in range(4)]
    torch.cuda.synchronize()
    found = []
    for stream, one in zip(streams, given, strict=True):
        with torch.cuda.stream(stream):
            found.append(call(one))
    torch.cuda.synchronize()
    for one, made in zip(given, found, strict=True):
        torch.testing.assert_close(made, one @ one @ one @ one)
