"""Scripts that are written for PyG learn the same with our layers: one line of each changes."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

import pyg_script_data  # noqa: E402
import torch_geometric.typing  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(beta state|invariant checks|to CSR format):UserWarning"),
]

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"), key=lambda one: one.name)
LAYERS = {
    **{"adjacency": "GCNConv", "gat": "GATConv", "gcn": "GCNConv", "gin": "GINConv"},
    **{"hetero": "SAGEConv", "sage": "SAGEConv"},
}


@pytest.fixture(autouse=True)
def in_double(monkeypatch):
    """Float64 throughout, and a loader where the native sampler is not installed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    if not (torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE):
        loader = pyg_script_data.NeighborLoader
        monkeypatch.setattr("torch_geometric.loader.NeighborLoader", loader)
    yield
    torch.set_default_dtype(before)


def run(text, name):
    """Run a script at a seed, and give what it leaves."""
    torch.manual_seed(11)
    left = {"__name__": name}
    exec(compile(text, name, "exec"), left)
    return left


def with_our_layer(text, layer):
    line = f"from torch_geometric.nn import {layer}\n"
    assert text.count(line) == 1
    return text.replace(line, f"from sparsefmt.nn import {layer}\n")


def test_each_script_is_known():
    assert [one.stem for one in SCRIPTS] == list(LAYERS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda one: one.stem)
def test_a_script_learns_the_same_with_one_other_line(path):
    text, layer = path.read_text(), LAYERS[path.stem]
    theirs, ours = run(text, path.stem), run(with_our_layer(text, layer), path.stem)
    assert theirs[layer].__module__.startswith("torch_geometric.")
    assert ours[layer].__module__ == "sparsefmt.nn"
    for name in ("losses", "accuracies"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-8)
    k = len(ours["losses"]) // 4
    assert sum(ours["losses"][-k:]) < sum(ours["losses"][:k])


def test_attention_that_drops_weights_learns_too():
    """It draws other ones than PyG's layer at that seed, which the documentation says."""
    path = next(one for one in SCRIPTS if one.stem == "gat")
    text = path.read_text().replace("heads=4)", "heads=4, dropout=0.6)")
    losses = run(with_our_layer(text, "GATConv"), "gat")["losses"]
    assert sum(losses[-5:]) < sum(losses[:5])
