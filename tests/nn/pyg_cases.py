"""What tests of layers share: numbers, pairs of layers of ours and PyG's, and how they compare."""

import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves
from torch_geometric import nn as pyg

from sparsefmt import nn


def numbers(*shape, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)


def both(make, device="cpu"):
    """Ours and PyG's, drawn at the same seed, in float64."""
    made = []
    for library in (nn, pyg):
        torch.default_generator.manual_seed(5)  # not devices too, for 2 ms
        made.append(make(library).double().to(device))
    return made


def is_made(parameter):
    """Return True if it has met features, without which it is of no size."""
    return not isinstance(parameter, UninitializedParameter)


def outcome(layer, x, edges, given=None, *, change=lambda y: y):
    """Return the result, and the gradients of features, of what lies beside, and of parameters.

    The result is copied after ``change``, which may write to it.
    """
    torch.default_generator.manual_seed(6)  # for parameters that the first call draws
    given = given or {}
    floats = {
        k: v.clone().requires_grad_()
        for k, v in given.items()
        if torch.is_tensor(v) and v.is_floating_point()
    }
    leaves = [one.clone().requires_grad_() for one in x]
    one = leaves[0] if len(leaves) == 1 else tuple(leaves)
    y = change(layer(one, edges, **(given | floats)))
    y = tree_leaves(y)  # and the weights of edges, of some
    wanted = [*leaves, *floats.values(), *filter(is_made, layer.parameters())]
    loss = sum(
        (one * numbers(*one.shape, seed=7, device=one.device)).sum()
        for one in y
        if one.is_floating_point()
    )
    kept = [one.detach().clone() for one in y]
    return [*kept, *torch.autograd.grad(loss, wanted, materialize_grads=True)]


def assert_same(mine, theirs):
    for one, two in zip(tree_leaves(mine), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
