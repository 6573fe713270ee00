"""Models, optimizers and training steps for the tests of captures."""

import pytest

torch = pytest.importorskip("torch")

from torch import optim  # noqa: E402
from torch.nn import BatchNorm1d, Dropout, Linear, Module, ModuleList  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.optim import SGD, Adam, AdamW  # noqa: E402

from sparsefmt import Graph  # noqa: E402
from sparsefmt.nn import GATConv, GCNConv, SAGEConv  # noqa: E402

N, WIDTH, CLASSES = 60, 16, 4
STEPS = {"cuda": 20, "cpu": 4}


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
