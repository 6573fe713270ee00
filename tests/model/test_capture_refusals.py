"""What captures refuse: when they are made, and when they are called."""

import itertools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from capture_cases import CLASSES, WIDTH, N, Trainer, batches, ring  # noqa: E402
from torch import optim  # noqa: E402
from torch.nn import Dropout, LazyLinear, Linear, Module, Parameter, Sequential  # noqa: E402
from torch.optim import SGD  # noqa: E402

from sparsefmt import DeviceError, DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.model import state  # noqa: E402
from sparsefmt.nn import SAGEConv, capture  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "may_run_uncaptured")


def test_an_optimizer_that_is_not_found_is_refused_before_it_steps(recorded):
    one = Trainer(recorded)
    before = one.parts["model"].weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"SGD\) that was not found .* state=\(model"):
        capture(one.step, *batches(recorded, 1)[0], state=[one.parts["model"]])
    assert torch.equal(one.parts["model"].weight, before)


def test_learning_rates_may_not_be_replaced(recorded):
    """Neither a number nor a tensor; nor may another state be loaded."""
    one = Trainer(recorded)
    pair, (group,) = batches(recorded, 1)[0], one.optimizer.param_groups
    call = capture(one.step, *pair)
    group["lr"] = 0.2
    with pytest.raises(UnsupportedError, match=r"lr of SGD from 0.1 to 0.2, .* lr=torch.tensor"):
        call(*pair)
    group["lr"] = 0.1
    call(*pair)
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    with pytest.raises(UnsupportedError, match="SGD has another state than when it was captured"):
        call(*pair)
    lr = torch.tensor(0.1, device=recorded)
    parameters = one.parts["model"].parameters()
    one.optimizer = SGD(parameters, lr=lr, fused=recorded == "cuda")
    call = capture(one.step, *pair)
    one.optimizer.param_groups[0]["lr"] = lr.clone()
    with pytest.raises(UnsupportedError, match=r"lr of SGD, .* fill the tensor, lr.fill_"):
        call(*pair)


def test_inputs_must_be_like_the_examples(place):
    x = torch.rand(4, 3, device=place)
    call = capture(lambda x, pair: x + pair[0], x, (x, None))
    assert call(x, (x, None)).shape == (4, 3)
    for given, error, text in (
        ((x[:2], (x, None)), ShapeError, r"input 0 has shape \(2, 3\), but \(4, 3\) in the"),
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
        self.how, self.calls, self.kept = how, 0, None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.how == "python":
            self.calls += 1
            return x * self.calls
        if self.how == "attribute":
            self.last = self.last + 1
            return x + self.last
        if self.how == "kept":
            self.kept = x.sum() if self.kept is None else self.kept + 1
            return x + self.kept
        if self.how == "buffer":
            self.seen = self.seen + 1
        if self.how == "in place":
            self.seen += 1
        return x + self.seen


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("python", r"changes calls of a Counting from 0 to 1, .* self.calls.add_\(1\)"),
        ("buffer", r"the buffer seen of a Counting: .*seen.copy_"),
        ("attribute", r"the place of last of a Counting: .* or set it to None before"),
        ("kept", "two runs of step from one state differ: result 0"),
    ],
)
def test_what_counts_on_the_host_is_refused(how, text, recorded):
    x, model = torch.rand(4, 3, device=recorded), Counting(how).to(recorded)
    model.last = torch.zeros((), device=recorded)
    before = model.last
    with pytest.raises(UnsupportedError, match=text):
        capture(model, x)
    assert model.calls == 0
    assert model.seen == 0
    assert model.last is before
    assert model.kept is None


def test_what_counts_on_the_device_is_captured(recorded):
    x, model = torch.rand(4, 3, device=recorded), Counting("in place").to(recorded)
    call = capture(model, x)
    assert [float((call(x) - x).mean()) for _ in range(3)] == pytest.approx([1, 2, 3], abs=1e-5)


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
    with pytest.raises(
        UnsupportedError, match=r"test_capture_refusals.py:\d+, in <lambda>, waits for"
    ):
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
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_step_is_no_part_of_another_capture():
    x = torch.rand(3, device="cuda")
    call = capture(lambda x: x + 1, x)
    with pytest.raises(UnsupportedError, match="called in the capture of a CUDA graph"):
        capture(lambda x: call(x) * 2, x)
    with pytest.raises(UnsupportedError, match="being captured on this stream: capture before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            capture(lambda x: x + 1, x)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m, _: m.eval(), "Sequential is in evaluation, but was captured in train"),
        (
            lambda m, _: setattr(m[0].weight, "data", m[0].weight.data.clone()),
            "weight has moved since it was captured: capture again",
        ),
        (lambda m, _: setattr(m[0], "weight", Parameter(m[0].weight.clone())), "in the place of w"),
        (lambda m, _: m.load_state_dict(m.state_dict(), assign=True), "in the place of weight"),
        (lambda m, _: m[0].bias.requires_grad_(False), "requires_grad of 0.bias is False"),
        (lambda m, _: setattr(m[1], "p", 0.25), "p of a Dropout is 0.25, but was captured as 0.5"),
        (lambda _, o: o.state.clear(), "SGD has another state"),
    ],
    ids=["mode", "moved", "parameter", "assign", "requires_grad", "dropout", "state"],
)
def test_what_the_graph_takes_for_constant_may_not_change(change, text, recorded):
    torch.manual_seed(0)
    model = Sequential(Linear(WIDTH, CLASSES), Dropout()).to(recorded)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    pair = batches(recorded, 1)[0]
    call = capture(step, *pair)
    call(*pair)
    change(model, optimizer)
    with pytest.raises(DeviceError if "moved" in text else UnsupportedError, match=text):
        call(*pair)


def test_names_of_a_step_may_not_be_bound_to_others(recorded):
    x, scale, weight = torch.rand(4, 3, device=recorded), 2, torch.ones(3, device=recorded)
    call = capture(lambda x: x * scale * weight, x)
    assert torch.equal(call(x), 2 * x)
    scale = 3
    with pytest.raises(UnsupportedError, match="scale, which step names, is another int"):
        call(x)
    scale, weight = 2, 2 * weight
    with pytest.raises(UnsupportedError, match="weight, which step names, is another Tensor"):
        call(x)


def test_an_edge_index_that_is_written_to_is_refused(recorded):
    model = SAGEConv(WIDTH, CLASSES).to(recorded).requires_grad_(False)
    x, edges = batches(recorded, 1)[0][0], ring(recorded)
    call = capture(lambda x: model(x, edges), x)
    call(x)
    edges[:, 0] = 0
    with pytest.raises(UnsupportedError, match=r"an edge_index .* has been written to"):
        call(x)


def test_two_models_of_one_class_are_both_watched(recorded, monkeypatch):
    torch.manual_seed(0)
    first, second = (Linear(3, 3).to(recorded) for _ in range(2))
    x, calls = torch.rand(4, 3, device=recorded), itertools.count()

    def step(x):
        with torch.no_grad():
            first.weight.add_(1.0 if next(calls) >= 5 else 0.0)
            return first(x) * 0 + second(x)

    with pytest.raises(UnsupportedError, match=r"not the step: Linear\.weight differs"):
        capture(step, x)


def in_a_hook(device):
    """Step in hooks of backward, by optimizers that nothing else holds."""
    model = Linear(3, 3).to(device)
    optimizers = {p: SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    return lambda x: model(x).sum().backward()


def of_many(device):
    models = [Linear(3, 3).to(device) for _ in range(5)]
    return lambda x: models[4](x)


def counting(device):
    calls = itertools.count()
    return lambda x: x + next(calls)


STEPS = {
    "count": (counting, "two runs of step from one state differ: result 0"),
    "lazy": (lambda at: LazyLinear(3).to(at), "weight of a LazyLinear has no shape yet: run step"),
    "hook": (in_a_hook, r"uses an optimizer \(SGD\) that was not found"),
    "list": (of_many, "a container has 5 items, more than 4"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_cannot_be_captured_are_refused(name, recorded, monkeypatch):
    monkeypatch.setattr(state, "MAX_ITEMS", 4)
    make, text = STEPS[name]
    with pytest.raises(UnsupportedError, match=text):
        capture(make(recorded), torch.rand(4, 3, device=recorded))


@pytest.mark.gpu
def test_inputs_on_the_cpu_beside_a_model_on_the_gpu_are_refused():
    table = torch.rand(4, 3, device="cuda")
    with pytest.raises(DeviceError, match="on cpu, cuda:0: move them to one device"):
        capture(lambda x: x.cuda() + table, torch.rand(4, 3))
