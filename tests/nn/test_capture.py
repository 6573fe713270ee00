"""Captured steps against the same steps run eagerly, and what a capture refuses.

On the CPU a recorder stands in for CUDA's: its replays run the step again, into the same results.
"""

import functools
import itertools
import random
from contextlib import nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import optim  # noqa: E402
from torch.nn import BatchNorm1d, Dropout, Linear, Module, ModuleList  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.optim import SGD, Adam, AdamW  # noqa: E402

from sparsefmt import DeviceError, DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.nn import GATConv, GCNConv, SAGEConv, capture, capturing  # noqa: E402

N, WIDTH, CLASSES = 200, 16, 4
STEPS = {"cuda": 20, "cpu": 4}

pytestmark = pytest.mark.usefixtures("one_thread")


class Fake:
    """A recorder without CUDA."""

    device = torch.device("cpu")
    capturing = staticmethod(lambda: False)
    aside = strictly = staticmethod(nullcontext)

    def record(self, run, generators):
        assert all(one.device == self.device for one in generators)
        # Who calls is a Captured, whose parameters a graph would know.
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


def ring(device, n=N):
    """Each vertex with its seven next ones, and a hub."""
    source = torch.arange(n).repeat(7)
    target = (source + torch.arange(1, 8).repeat_interleave(n)) % n
    hub = torch.stack([torch.arange(1, n), torch.zeros(n - 1, dtype=torch.int64)])
    return torch.cat([torch.stack([source, target]), hub], 1).to(device)


class Net(Module):
    """Two layers with dropout and a norm between."""

    def __init__(self, first, second, p=0.5):
        super().__init__()
        self.layers = ModuleList([first, second])
        self.norm, self.dropout = BatchNorm1d(WIDTH), Dropout(p)

    def forward(self, x, graph):
        x = self.norm(self.layers[0](x, graph)).relu()
        return self.layers[1](self.dropout(x), graph)


NETS = {
    "gcn": lambda: Net(GCNConv(WIDTH, WIDTH), GCNConv(WIDTH, CLASSES)),
    "sage": lambda: Net(SAGEConv(WIDTH, WIDTH), SAGEConv(WIDTH, CLASSES)),
    "gat": lambda: Net(
        GATConv(WIDTH, 4, heads=4, dropout=0.4), GATConv(WIDTH, CLASSES, dropout=0.4)
    ),
    "maxk": lambda: Net(SAGEConv(WIDTH, WIDTH, k=4), SAGEConv(WIDTH, CLASSES, k=2)),
    "samples": lambda: Net(
        SAGEConv(WIDTH, WIDTH, training_sample=3), SAGEConv(WIDTH, CLASSES, training_sample=3)
    ),
}
OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {"lr": 0.01}),
    "adamw": (AdamW, {"lr": 0.01, "fused": True}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "amsgrad": (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
    "asgd": (optim.ASGD, {"lr": 0.01, "t0": 2}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "adadelta": (optim.Adadelta, {"lr": 0.5}),
}


@pytest.fixture(autouse=True)
def may_run_uncaptured(monkeypatch):
    """Optimizers that are capturable warn of eager steps on a GPU."""
    monkeypatch.setattr(
        optim.Optimizer, "_warned_capturable_if_run_uncaptured", True, raising=False
    )


def training(name, optimizer, device, seed=0):
    """A model, its optimizer and a step of features and labels."""
    torch.manual_seed(seed)
    model = NETS[name]().to(device)
    cls, options = OPTIMIZERS[optimizer]
    capturable = {} if cls is SGD else {"capturable": device == "cuda"}
    optimizer = cls(model.parameters(), **options, **capturable)
    graph = Graph.from_edge_index(ring(device), num_nodes=N)

    def step(x, labels):
        optimizer.zero_grad()
        loss = cross_entropy(model(x, graph), labels)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def batches(device, number=None):
    torch.manual_seed(7)
    return [
        (torch.randn(N, WIDTH, device=device), torch.randint(CLASSES, (N,), device=device))
        for _ in range(number or STEPS[device])
    ]


def left(model, optimizer, with_state=True):
    """Copies of all that a step may change."""
    found = {k: v.clone() for k, v in model.state_dict().items()}
    found |= {
        f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    if with_state:
        for number, held in optimizer.state_dict()["state"].items():
            found |= {f"{number} {k}": v.clone() for k, v in held.items() if v is not None}
    return found


def assert_equal(found, expected, exactly=True):
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        if exactly:
            assert torch.equal(found[name], one), name
        else:
            assert torch.allclose(found[name], one, rtol=1e-3, atol=1e-4), name


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
        seen = []
        for pair in pairs:
            call(*pair)
            seen.append({str(len(seen)): p for p in left(model, optimizer).values()})
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


class Trainer:
    """Holds what its method uses."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.parts = {"model": Linear(WIDTH, CLASSES).to(device)}
        self.optimizer = SGD(self.parts["model"].parameters(), lr=0.1)

    def step(self, x, y):
        return fit(self.parts["model"], self.optimizer, x, y)

    def __call__(self, x, y):
        return self.step(x, y)


def fit(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


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


def test_an_optimizer_that_is_not_found_is_refused_before_it_steps(recorded):
    one = Trainer(recorded)
    before = one.parts["model"].weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"SGD\) that was not found .* state=\(model"):
        capture(one.step, *batches(recorded, 1)[0], state=[one.parts["model"]])
    assert torch.equal(one.parts["model"].weight, before)


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


def test_a_learning_rate_that_is_a_number_may_not(recorded):
    one = Trainer(recorded)
    x, y = batches(recorded, 1)[0]
    call = capture(one.step, x, y)
    one.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(UnsupportedError, match=r"lr of SGD from 0.1 to 0.2, .* lr=torch.tensor"):
        call(x, y)
    one.optimizer.param_groups[0]["lr"] = 0.1
    call(x, y)
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    with pytest.raises(UnsupportedError, match="SGD has loaded another state"):
        call(x, y)


def test_training_and_evaluation_are_two_captures(recorded):
    model, _, step = training("gcn", "sgd", recorded)
    pair = batches(recorded, 1)[0]
    call = capture(step, *pair)
    model.eval()
    with pytest.raises(UnsupportedError, match=r"Net is in evaluation, but was captured in train"):
        call(*pair)


def test_parameters_that_have_moved_are_refused(recorded):
    one = Trainer(recorded)
    x, y = batches(recorded, 1)[0]
    call = capture(one.step, x, y)
    weight = one.parts["model"].weight
    weight.data = weight.data.clone()
    with pytest.raises(DeviceError, match="weight has moved since it was captured: capture again"):
        call(x, y)


def test_inputs_must_be_like_the_examples(place):
    x = torch.rand(4, 3, device=place)
    call = capture(lambda x, pair: x + pair[0], x, (x, None))
    assert call(x, (x, None)).shape == (4, 3)
    for given, error, text in (
        (
            (x[:2], (x, None)),
            ShapeError,
            r"input 0 has shape \(2, 3\), but \(4, 3\) in the",
        ),
        ((x.double(), (x, None)), DtypeError, "input 0 has dtype torch.float64, but torch.float32"),
        ((x.to("meta"), (x, None)), DeviceError, "input 0 has device meta, but"),
        ((x, (x.tolist(), None)), ShapeError, r"other places than .* \(14 and 3\): give"),
        ((x, (None, None)), DtypeError, "input 1 is None, not so in the example inputs"),
        ((x, (x, 3)), DtypeError, "input 2 is a int: give a tensor"),
        ((x,), ShapeError, "other places than"),
    ):
        with pytest.raises(error, match=text):
            call(*given)


def test_arguments_that_are_no_tensors_are_refused(place):
    x = torch.rand(4, 3, device=place)
    graph = Graph.from_edge_index(ring(place), num_nodes=N)
    for arguments, error, text in (
        ((3, x), DtypeError, "step is a int"),
        ((abs, 3.0), DtypeError, r"input 0 is a float: give a tensor, or let step close over it"),
        ((abs, graph), UnsupportedError, "input 0 is a graph, .* one function for each graph"),
        ((abs, x.to_sparse()), UnsupportedError, "input 0 has layout torch.sparse_coo"),
        ((capture(abs, x), x), UnsupportedError, "step is captured already"),
    ):
        with pytest.raises(error, match=text):
            capture(*arguments)
    with pytest.raises(UnsupportedError, match="capture_error_mode is 'all': use one of"):
        capture(abs, x, capture_error_mode="all")


def test_results_that_are_no_tensors_are_refused(place):
    x = torch.rand(4, 3, device=place)
    with pytest.raises(DtypeError, match=r"step returns a int, .* not loss.item\(\)"):
        capture(lambda x: (x, x.shape[0]), x)(x)


class Counting(Module):
    """Does something else at each call, in one of the ways that a graph cannot follow."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.how == "python":
            return x * self.calls
        if self.how == "buffer":
            self.seen = self.seen + 1
        if self.how == "in place":
            self.seen += 1
        return x + self.seen


def test_what_counts_on_the_host_is_refused(recorded):
    x = torch.rand(4, 3, device=recorded)
    model = Counting("buffer").to(recorded)
    with pytest.raises(UnsupportedError, match=r"the buffer seen of a Counting: .*seen.copy_"):
        capture(model, x)
    assert model.calls == 0
    assert model.seen == 0
    model.how = "in place"
    call = capture(model, x)
    assert [float((call(x) - x).mean()) for _ in range(3)] == pytest.approx([1, 2, 3], abs=1e-5)


def test_a_step_that_no_state_explains_is_refused(recorded):
    x, calls = torch.rand(4, 3, device=recorded), itertools.count()
    with pytest.raises(UnsupportedError, match="two runs of step from one state differ: result 0"):
        capture(lambda x: x + next(calls), x)


def test_a_first_replay_that_differs_is_refused(recorded, monkeypatch):
    one = Trainer(recorded)
    before = one.parts["model"].weight.detach().clone()
    calls = itertools.count()

    def step(x, y):
        loss = one.step(x, y)
        if next(calls) >= 5:  # the recorded run and what a stand-in replays
            with torch.no_grad():
                one.parts["model"].weight.add_(0.01)
        return loss

    with pytest.raises(UnsupportedError, match=r"not the step: weight differs by 1.0e-02, where"):
        capture(step, *batches(recorded, 1)[0])
    assert torch.equal(one.parts["model"].weight, before)
    assert not one.optimizer.state


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


def test_inputs_are_not_written_to(recorded):
    x = torch.rand(4, 3, device=recorded)
    with pytest.raises(UnsupportedError, match="step writes to tensor 0 of its inputs"):
        capture(lambda x: x.add_(1), x)
    with pytest.raises(UnsupportedError, match="step leaves a gradient at tensor 0 of its inputs"):
        capture(lambda x: x.sum().backward(), x.clone().requires_grad_())
    gradient = capture(
        lambda x: torch.autograd.grad(x.square().sum(), x)[0], x.clone().requires_grad_()
    )
    assert torch.allclose(gradient(x), 2 * x)


def test_an_edge_index_among_the_inputs_is_refused(recorded):
    model = SAGEConv(WIDTH, CLASSES).to(recorded)
    x, edges = batches(recorded, 1)[0][0], ring(recorded)
    with pytest.raises(UnsupportedError, match=r"input 1 is an edge_index .* pad graphs to one"):
        capture(lambda x, edge_index: model(x, edge_index), x, edges)
    call = capture(lambda x: model(x, edges), x)
    assert torch.equal(call(x), model(x, edges))


def test_schedulers_and_scalers_stay_outside(recorded):
    one = Trainer(recorded)
    schedule = optim.lr_scheduler.ExponentialLR(one.optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu")
    pair = batches(recorded, 1)[0]

    def scheduled(x, y):
        loss = one.step(x, y)
        schedule.step()
        return loss

    with pytest.raises(UnsupportedError, match=r"ExponentialLR.step\(\).* call it after step"):
        capture(scheduled, *pair)
    assert schedule.last_epoch == 0
    with pytest.raises(UnsupportedError, match=r"GradScaler.* bfloat16"):
        capture(lambda x, y: scaler.scale(one.step(x, y)), *pair)


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "SGD"])
def test_optimizers_that_cannot_be_captured_are_refused(name, recorded):
    one = Trainer(recorded)
    options = {"momentum": 0.5, "dampening": 0.1} if name == "SGD" else {}
    one.optimizer = getattr(torch.optim, name)(one.parts["model"].parameters(), **options)
    pair = batches(recorded, 1)[0]
    text = {
        "Adam": r"Adam counts its steps on the CPU: make it with capturable=True",
        "Adagrad": "Adagrad keeps step on the CPU",
        "SGD": "what SGD with dampening holds of weight .* take one step before capture",
    }[name]
    if name == "Adagrad" and recorded == "cpu":
        pytest.skip("on the fake device, the CPU, its counter is where it should be")
    with pytest.raises(UnsupportedError, match=text):
        capture(one.step, *pair)
    if name == "SGD":
        one.step(*pair)
        capture(one.step, *pair)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0.5],
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.cuda.synchronize(),
        lambda x: x.cpu(),
    ],
    ids=["item", "mask", "tensor", "synchronize", "cpu"],
)
def test_what_waits_is_named_by_its_line(wait):
    one = Trainer("cuda")
    before = one.parts["model"].weight.detach().clone()

    def step(x, y):
        wait(x)
        return one.step(x, y)

    pair = batches("cuda", 1)[0]
    with pytest.raises(UnsupportedError, match=r"test_capture.py:\d+, in <lambda>, waits for"):
        capture(step, *pair)
    assert torch.equal(one.parts["model"].weight, before)
    # Random numbers and memory are as good as before.
    assert torch.rand(9, device="cuda").std() > 0
    assert capture(one.step, *pair)(*pair).isfinite()


@pytest.mark.gpu
def test_a_graph_that_is_new_in_each_step_is_refused():
    model, edges = SAGEConv(WIDTH, CLASSES).to("cuda"), ring("cuda")
    x = batches("cuda", 1)[0][0]
    with pytest.raises(UnsupportedError, match="would be built in the capture of a CUDA graph"):
        capture(lambda x: model(x, Graph.from_edge_index(edges, num_nodes=N)), x)
    assert torch.rand(9, device="cuda").std() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["torch", "random", "numpy", "generator"])
def test_random_numbers_of_the_host_are_refused(source):
    own = torch.Generator()
    draw = {
        "torch": lambda: torch.rand(()),
        "generator": lambda: torch.rand((), generator=own),
        "random": lambda: random.random(),
        "numpy": lambda: np.random.random(),  # noqa: NPY002
    }[source]

    def step(x):
        draw()
        return x + 1

    with pytest.raises(UnsupportedError, match=r"draws random numbers on the CPU|cannot be read"):
        capture(step, torch.rand(3, device="cuda"))


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
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_step_is_no_part_of_another_capture():
    x = torch.rand(3, device="cuda")
    call = capture(lambda x: x + 1, x)
    with pytest.raises(UnsupportedError, match="called in the capture of a CUDA graph"):
        capture(lambda x: call(x) * 2, x)
    with pytest.raises(UnsupportedError, match="being captured on this stream: capture before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            capture(lambda x: x + 1, x)


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
