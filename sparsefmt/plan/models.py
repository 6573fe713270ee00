"""Expressions of graph layers, as their papers write them.

``A`` is the graph, ``H`` the features (n x in), ``W`` the weights (in x out); ``D`` is the diagonal
of the degrees to the power that the layer normalises by.
"""

from .expression import Apply, Expression, Hop, Leaf, product, total


def features(constant: bool = False, grad: bool = True) -> Leaf:
    """Return the features of the vertices; a first layer's may be constant and need no gradient."""
    return Leaf("H", "dense", "n", "in", constant, grad and not constant)


def weight(name: str = "W", rows: str = "in", cols: str = "out") -> Leaf:
    """Return a parameter."""
    return Leaf(name, "dense", rows, cols, grad=True)


def graph(name: str = "A", *, weighted: bool = False) -> Leaf:
    """Return the adjacency, which is the same at every step."""
    return Leaf(name, "weighted" if weighted else "unweighted", "n", "n", True, entries="nnz")


def degrees(name: str = "D") -> Leaf:
    """Return a diagonal of powers of the degrees."""
    return Leaf(name, "diagonal", "n", "n", True)


def gcn(H: Leaf, A: Leaf | None = None) -> Expression:
    """Return ``D·A·D·H·W``: GCN (ICLR'17), equation 2."""
    D = degrees()
    return product(D, A or graph(), D, H, weight())


def sgc(H: Leaf, hops: int) -> Expression:
    """Return ``(D·A·D)^hops·H·W``: SGC (ICML'19), equation 8."""
    return product(*(_hop(),) * hops, H, weight())


def tagcn(H: Leaf, hops: int) -> Expression:
    """Return ``sum_k (D·A·D)^k·H·W_k``: TAGCN (arXiv 1710.10370), equation 4."""
    powers = ((_hop(),) * k for k in range(hops + 1))
    return total(*(product(*power, H, weight(f"W{k}")) for k, power in enumerate(powers)))


def gin(H: Leaf) -> Expression:
    """Return ``B·H·W``, where B is A with ``1 + eps`` on its diagonal: GIN (ICLR'19), equation 4.1.

    ``eps`` is 0, as it is at first, so that B is unweighted.
    """
    return product(graph("B"), H, weight())


def sage(H: Leaf) -> Expression:
    """Return ``D·A·H·W + H·V`` with ``D = 1 / degree``: GraphSAGE (NeurIPS'17), with means."""
    return total(product(degrees(), graph(), H, weight()), product(H, weight("V")))


def gat(H: Leaf, *, opened: bool = False) -> Expression:
    """Return ``attention(H·W)·H·W``: GAT (ICLR'18), equations 1 to 4.

    ``opened`` writes the scores of sources and targets as thin products ``H·W·a`` and ``H·W·b``.
    """
    W, transformed = weight(), product(H, weight())
    scores = [transformed]
    if opened:
        scores = [product(H, W, weight(name, "out", "heads")) for name in ("a", "b")]
    attention = Apply(
        "attention", tuple(scores), "weighted", "n", "n", ("nnz", "n", "heads"), "nnz"
    )
    return product(attention, transformed) if opened else product(attention, H, W)


def _hop() -> Hop:
    D = degrees()
    return Hop((D, graph(), D))
