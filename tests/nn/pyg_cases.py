"""What tests of layers share: numbers, pairs of layers of ours and PyG's, and how they compare."""

import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves
from torch_geometric import nn as pyg

from sparsefmt import nn


def numbers(*shape, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)


def seed(number, device="cpu"):
    """Seed the generators of the CPU and of a device, not of all devices: that takes 2 ms."""
    torch.default_generator.manual_seed(number)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(number)


#: Layers that take other arguments than two widths, beside the networks of GIN and EdgeConv.
WITHOUT_WIDTHS = "AGNNConv APPNP LGConv SimpleConv FAConv GCN2Conv GatedGraphConv".split()
MORE = {
    "RGCNConv": {"num_relations": 2},
    "FastRGCNConv": {"num_relations": 2},
    "SGConv": {"K": 2},
    "TAGConv": {"K": 2},
    "APPNP": {"K": 2, "alpha": 0.2},
    "SSGConv": {"K": 2, "alpha": 0.2},
    "ChebConv": {"K": 3},
    "ARMAConv": {"num_stacks": 2, "num_layers": 2},
    "GCN2Conv": {"alpha": 0.2},
    "PNAConv": {
        "aggregators": ["mean", "std"],
        "scalers": ["identity", "linear"],
        "deg": torch.tensor([1, 2, 3]),
    },
}


def make(library, kind, width, out, **options):
    """Make a layer by the name of its class; networks are linear maps."""
    layer, options = getattr(library, kind), MORE.get(kind, {}) | options
    if kind in WITHOUT_WIDTHS:
        widths = {"FAConv": [width], "GCN2Conv": [width], "GatedGraphConv": [max(width, out), 2]}
        return layer(*widths.get(kind, []), **options)
    if "GIN" in kind or kind == "EdgeConv":
        wide = 2 * width if kind == "EdgeConv" else width
        return layer(torch.nn.Linear(wide, out), **options)
    return layer(width, out, **options)


def both(make, device="cpu"):
    """Ours and PyG's, drawn at the same seed, in float64."""
    made = []
    for library in (nn, pyg):
        seed(5, device)
        made.append(make(library).double().to(device))
    return made


class SparseTensor:
    """What torch_sparse.SparseTensor has that is read here."""

    def __init__(self, indptr, indices, value, sizes, looped=False):
        self.parts, self.sizes, self.looped = (indptr, indices, value), sizes, looped

    def csr(self):
        return self.parts

    def sparse_sizes(self):
        return self.sizes

    def set_diag(self):
        return SparseTensor(*self.parts, self.sizes, looped=True)

    def set_value(self, value, layout):
        assert layout == "coo"
        return self.looped, value


def is_made(parameter):
    """Return True if it has met features, without which it is of no size."""
    return not isinstance(parameter, UninitializedParameter)


def outcome(layer, x, edges, given=None, *, change=lambda y: y):
    """Return the result, and the gradients of features, of what lies beside, and of parameters.

    The result is copied after ``change``, which may write to it.
    """
    given = given or {}
    floats = {
        k: v.clone().requires_grad_()
        for k, v in given.items()
        if torch.is_tensor(v) and v.is_floating_point()
    }
    leaves = [one.clone().requires_grad_(one.is_floating_point()) for one in x]
    seed(6, leaves[0].device)  # for parameters that the first call draws
    one = leaves[0] if len(leaves) == 1 else tuple(leaves)
    # And the weights of edges, of some.
    y = tree_leaves(change(layer(one, edge_index=edges, **(given | floats))))
    wanted = [*leaves, *floats.values(), *filter(is_made, layer.parameters())]
    wanted = [one for one in wanted if one.requires_grad]
    loss = sum(
        (one * numbers(*one.shape, seed=7, device=one.device)).sum()
        for one in y
        if one.is_floating_point()
    )
    kept = [one.detach().clone() for one in y]
    return [*kept, *torch.autograd.grad(loss, wanted, materialize_grads=True)]


def assert_same(mine, theirs, close=1e-10):
    """Check for equal results up to rounding, and NaN where PyG's are."""
    mine, theirs = tree_leaves(mine), tree_leaves(theirs)
    torch.testing.assert_close(mine, theirs, rtol=close, atol=close, equal_nan=True)
