"""A naive reference of attention on graphs, and what its tests share."""

import numpy as np
import torch
from autograd_cases import entries

from sparsefmt import CSR, Graph
from sparsefmt.autograd import attention, dot_aggregate, gat_aggregate, gatv2_aggregate
from sparsefmt.autograd.tensors.prepare import tensors_of

SEED = 1234567890123


KINDS = ("gat", "gatv2", "dot", "dot of keys")


def loop_graph(n=7, *, device="cpu", index_dtype=np.int32, seed=0) -> Graph:
    """Square, not symmetric: loops once, twice and not at all, duplicates, an empty row."""
    rng = np.random.default_rng(seed)
    row = np.concatenate([rng.integers(0, n, 3 * n), [0, 0, 2, n - 1]])
    col = np.concatenate([rng.integers(0, n, 3 * n), [0, 0, 2, n - 1]])
    keep = row != 1
    order = np.argsort(row[keep], kind="stable")
    row, col = row[keep][order], col[keep][order]
    indptr = np.searchsorted(row, np.arange(n + 1)).astype(index_dtype)
    return Graph(CSR(indptr, col.astype(index_dtype), shape=(n, n))).to(device)


def from_scores(graph, options, *inputs):
    return attention.from_scores(tensors_of(graph), options, *inputs)


def from_vectors(graph, options, h, source, target, *scores, bias=None):
    return attention.from_vectors(tensors_of(graph), options, h, source, target, bias, *scores)


def with_loops(graph, loops):
    """Row, column and number of each entry that counts, loops behind the stored ones."""
    rows, cols = entries(graph)
    numbers = torch.arange(graph.nnz)
    if loops:
        stays, own = rows != cols, torch.arange(graph.n_rows)
        rows, cols = torch.cat([rows[stays], own]), torch.cat([cols[stays], own])
        numbers = torch.cat([numbers[stays], graph.nnz + own])
    return rows, cols, numbers


def words(seed, numbers, heads) -> np.ndarray:
    """(entries, heads) first word of Philox4x32-10."""
    low = np.uint64(2**32 - 1)
    counter, stream = np.broadcast_arrays(
        numbers.numpy().astype(np.uint64)[:, None], np.arange(heads, dtype=np.uint64)
    )
    half = np.uint64(32)
    a, b, c, d = counter & low, counter >> half, stream, np.zeros_like(stream)
    k0, k1 = np.uint64(seed % 2**64) & low, np.uint64(seed % 2**64) >> half
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (q >> half) ^ b ^ k0, q & low, (p >> half) ^ d ^ k1, p & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return a


def mask(seed, dropout, numbers, heads):
    """(entries, heads) 0 where an entry is dropped, else 1 / (1 - dropout)."""
    if not dropout:
        return 1.0
    stays = words(seed, numbers, heads) >= np.uint64(round(dropout * 2**32))
    return torch.from_numpy(stays / (1 - dropout))


def edge_part(edges, loop_edges, graph, loops, numbers, heads):
    """(entries, heads) edge scores of the entries that count."""
    parts = [torch.zeros(graph.nnz, heads) if edges is None else edges.reshape(graph.nnz, heads)]
    if loops:
        own = torch.zeros(graph.n_rows, heads) if loop_edges is None else loop_edges
        parts.append(own.reshape(graph.n_rows, heads))
    return torch.cat([one.double() for one in parts])[numbers]


def aggregate(graph, rows, cols, scores, values, kept):
    """(n_rows, heads, feat) by a softmax over each row and a sum: differentiable."""
    at = rows[:, None].expand_as(scores)
    empty = torch.full((graph.n_rows, scores.shape[1]), -torch.inf, dtype=scores.dtype)
    top = empty.scatter_reduce(0, at, scores.detach(), "amax")
    p = (scores - top[rows]).exp()
    sums = torch.zeros_like(empty).scatter_add(0, at, p)
    weights = p / sums[rows] * kept
    out = values.new_zeros(graph.n_rows, *values.shape[1:])
    return out.index_add(0, rows, weights[:, :, None] * values[cols])


def headed(x):
    return x if x.dim() == 3 else x[:, None]


def naive_gat(
    graph, h, el, er, edges=None, loop_edges=None, *, slope=0.2, dropout=0.0, seed=0, loops=False
):
    x = headed(h)
    heads = x.shape[1]
    rows, cols, numbers = with_loops(graph, loops)
    own = edge_part(edges, loop_edges, graph, loops, numbers, heads)
    z = el.reshape(-1, heads)[cols] + er.reshape(-1, heads)[rows] + own
    scores = torch.where(z > 0, z, slope * z)
    kept = mask(seed, dropout, numbers, heads)
    return aggregate(graph, rows, cols, scores, x, kept).reshape(graph.n_rows, *h.shape[1:])


def naive_attend(
    graph,
    queries,
    keys,
    values=None,
    att=None,
    edges=None,
    *,
    slope=0.2,
    scale=1.0,
    dropout=0.0,
    seed=0,
    loops=False,
):
    q, k, v = (headed(one) for one in (queries, keys, keys if values is None else values))
    heads = q.shape[1]
    rows, cols, numbers = with_loops(graph, loops)
    own = edge_part(edges, None, graph, loops, numbers, heads)
    if att is None:
        scores = scale * (q[rows] * k[cols]).sum(-1) + own
    else:
        z = q[rows] + k[cols]
        scores = (att.reshape(1, *q.shape[1:]) * torch.where(z > 0, z, slope * z)).sum(-1) + own
    kept = mask(seed, dropout, numbers, heads)
    return aggregate(graph, rows, cols, scores, v, kept).reshape(graph.n_rows, *keys.shape[1:])


def shapes_of(kind, graph, heads, feat):
    """Of what the function takes beside the graph, edge scores last; heads may be ()."""
    rows, cols = (graph.n_rows, *heads), (graph.n_cols, *heads)
    edges = (graph.nnz, *heads)
    return {
        "gat": [(*cols, feat), cols, rows, edges],
        "gatv2": [(*cols, feat), (*rows, feat), (*heads, feat), edges],
        "dot": [(*rows, feat), (*cols, feat), (*cols, feat), edges],
        "dot of keys": [(*rows, feat), (*cols, feat), edges],
    }[kind]


def call(kind, graph, given, **options):
    """The function itself; ``given`` may lack the edge scores."""
    if kind == "gat":
        return gat_aggregate(graph, *given, **options)
    if kind == "gatv2":
        return gatv2_aggregate(graph, *given, **options)
    if kind == "dot of keys":
        given = [*given[:2], None, *given[2:]]
    return dot_aggregate(graph, *given, **options)


def naive(kind, graph, given, *, dropout=0.0, seed=0, self_loops=False):
    options = {"dropout": dropout, "seed": seed, "loops": self_loops}
    if kind == "gat":
        return naive_gat(graph, *given, **options)
    if kind == "gatv2":
        left, right, att, *edges = given
        return naive_attend(graph, right, left, None, att, *edges, **options)
    if kind == "dot of keys":
        given = [*given[:2], None, *given[2:]]
    queries, keys, values, *edges = given
    scale = 1 / keys.shape[-1] ** 0.5
    return naive_attend(graph, queries, keys, values, None, *edges, scale=scale, **options)


def host(tensors_):
    return [one.detach().cpu().double().requires_grad_() for one in tensors_]


def assert_near(found, exact, *, units=64, dtype=torch.float64, gradient=True):
    """Within so many roundings of the largest value; sums of 2-byte features run in float32.

    But results are rounded: a gradient reads them, and adds up what they are off over the entries.
    """
    largest = max(float(exact.detach().abs().max()), 1) if exact.numel() else 1
    units = units if dtype.itemsize > 2 else 16 if gradient else 1
    atol = units * torch.finfo(dtype).eps * largest
    torch.testing.assert_close(found.detach().cpu().double(), exact.detach(), rtol=0, atol=atol)
