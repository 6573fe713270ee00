"""The float64 oracle of ``benchmarks fuse`` against dense NumPy and central differences."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is torch's")

from benchmarks import _graphs, _oracle  # noqa: E402  # without torch they cannot be imported
from benchmarks.attention import cases, oracle  # noqa: E402
from sparsefmt import Graph  # noqa: E402

N, M, HEADS, FEAT = 9, 7, 2, 3
SLOPE = 0.2


@pytest.fixture
def small():
    return _graphs.load("small", device="cpu")


def problem(kind):
    """A random pattern with an empty row, a full one and an empty column, and inputs in float64."""
    rng = np.random.default_rng(0)
    mask = rng.random((N, M)) < 0.4
    mask[2], mask[4], mask[:, 3] = False, True, False
    shapes = {
        "gat": {"h": (M, HEADS, FEAT), "el": (M, HEADS), "er": (N, HEADS)},
        "gatv2": {"left": (M, HEADS, FEAT), "right": (N, HEADS, FEAT), "att": (HEADS, FEAT)},
        "dot": {name: (M, HEADS, FEAT) for name in ("queries", "keys", "values")}
        | {"queries": (N, HEADS, FEAT)},
    }[kind]
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return mask, inputs, rng.standard_normal((N, HEADS, FEAT))


def scores(kind, x):
    """(N, M, HEADS), of all pairs."""
    if kind == "gat":
        z = x["el"][None] + x["er"][:, None]
        return np.where(z > 0, z, SLOPE * z)
    if kind == "gatv2":
        z = x["left"][None] + x["right"][:, None]
        return (x["att"] * np.where(z > 0, z, SLOPE * z)).sum(-1)
    return np.einsum("ihf,jhf->ijh", x["queries"], x["keys"]) / np.sqrt(FEAT)


def dense(kind, mask, x):
    """(N, HEADS, FEAT) by dense arrays."""
    e = np.exp(scores(kind, x)) * mask[..., None]
    p = e / np.maximum(e.sum(1, keepdims=True), 1e-300)
    return np.einsum("ijh,jhf->ihf", p, x[oracle.VALUES[kind]])


def numerical(kind, mask, x, grad, name, step=1e-6):
    """The gradient of one input, by central differences."""
    found = np.zeros_like(x[name])
    for at in np.ndindex(found.shape):
        ends = []
        for sign in (step, -step):
            moved = {key: value.copy() for key, value in x.items()}
            moved[name][at] += sign
            ends.append((dense(kind, mask, moved) * grad).sum())
        found[at] = (ends[0] - ends[1]) / (2 * step)
    return found


def oracle_of(kind, mask, x, grad):
    # Not in the order of the rows: any order will do.
    rows, cols = np.nonzero(mask)
    order = np.random.default_rng(1).permutation(len(rows))
    ends = tuple(torch.from_numpy(end[order]) for end in (rows, cols))
    inputs = {name: torch.from_numpy(value) for name, value in x.items()}
    return oracle.Exact(kind, ends, inputs, torch.from_numpy(grad), slope=SLOPE)


@pytest.mark.parametrize("kind", oracle.SIDES)
def test_the_oracle_agrees_with_dense_arrays_and_differences(kind, monkeypatch):
    monkeypatch.setattr(oracle, "BUDGET", 5 * HEADS * FEAT)  # several chunks
    mask, x, grad = problem(kind)
    exact = {"out": dense(kind, mask, x)}
    exact |= {name: numerical(kind, mask, x, grad, name) for name in x}
    found = oracle_of(kind, mask, x, grad)
    sums = found.at("rows", torch.arange(N)) | found.at("cols", torch.arange(M))
    if kind == "gatv2":
        sums["att"] = tuple(tensor[0] for tensor in found.att())
    assert sums.keys() == exact.keys()
    for name, (value, magnitude) in sums.items():
        np.testing.assert_allclose(value.numpy(), exact[name], atol=1e-8, err_msg=name)
        assert (magnitude >= value.abs() * (1 - 1e-12)).all(), name
    errors = found.errors({name: torch.from_numpy(value) for name, value in exact.items()})
    assert errors.keys() == exact.keys()
    assert oracle.complaint(errors, torch.float32) is None


@pytest.mark.parametrize("kind", oracle.SIDES)
@pytest.mark.parametrize("fault", [1 + 1e-3, np.nan])
def test_the_oracle_finds_a_wrong_number_in_every_result(kind, fault):
    mask, x, grad = problem(kind)
    exact = oracle_of(kind, mask, x, grad)
    sums = exact.at("rows", torch.arange(N)) | exact.at("cols", torch.arange(M))
    right = {name: value.float() for name, (value, _) in sums.items()}
    assert oracle.complaint(exact.errors(right), torch.float32) is None
    for name, tensor in right.items():
        wrong = tensor.clone()
        wrong.view(-1)[(tensor.abs() / sums[name][1].clamp(min=1e-9)).argmax()] *= fault
        errors = exact.errors(right | {name: wrong})
        complaint = oracle.complaint(errors, torch.float32)
        assert complaint.startswith(f"errors of {name} "), complaint


@pytest.mark.parametrize("kind", oracle.SIDES)
def test_rows_that_sampled_vertices_need_are_enough(kind, small, monkeypatch):
    monkeypatch.setattr(oracle, "sampled", partial(oracle.sampled, samples=4))
    ours = cases.Attention(kind, Graph(small), HEADS, FEAT)
    found = dict(zip(("out", *ours.inputs), ours.both(), strict=True))
    ends = cases.ends_of(small)
    whole, part = (oracle.Exact(kind, ends, ours.inputs, ours.grad) for _ in range(2))
    assert whole.sums.all(1).sum() > 500
    found.pop("att", None)
    assert whole.errors(found) == pytest.approx(part.errors(found), rel=1e-6)
    assert whole.focus is None
    assert 0 < (part.sums > 0).all(1).sum() < (whole.sums > 0).all(1).sum()


def test_a_row_without_entries_must_be_zero():
    mask, x, grad = problem("gat")
    exact = oracle_of("gat", mask, x, grad)
    out = exact.at("rows", torch.arange(N))["out"][0]
    assert (out[2] == 0).all()
    out[2, 0, 0] = 1e-30
    assert exact.errors({"out": out})["out"] == np.inf


def test_half_precision_may_round_twice_and_no_more():
    assert oracle.limit(torch.float16) == pytest.approx(1e-3 + 2.0**-11)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        most = oracle.limit(dtype)
        assert oracle.complaint({"h": most}, dtype) is None
        assert oracle.complaint({"h": 1.1 * most}, dtype)
        assert oracle.complaint({"h": float("nan")}, dtype)


def test_products_of_the_oracle_are_those_of_the_matrix_and_of_its_transpose(monkeypatch):
    monkeypatch.setattr(oracle, "BUDGET", 12)
    rng = np.random.default_rng(0)
    A = rng.standard_normal((N, M)) * (rng.random((N, M)) < 0.5)
    ends = tuple(map(torch.from_numpy, np.nonzero(A)))
    weights = torch.from_numpy(A[np.nonzero(A)])
    for side, B in (("rows", A), ("cols", A.T)):
        x = rng.standard_normal((B.shape[1], 4))
        vertices = torch.tensor([0, 2, 5])
        found = oracle.product_at(ends, weights, torch.from_numpy(x), vertices, side)
        np.testing.assert_allclose(found[0].numpy(), (B @ x)[[0, 2, 5]], atol=1e-12)
        np.testing.assert_allclose(found[1].numpy(), (abs(B) @ abs(x))[[0, 2, 5]], atol=1e-12)


def test_the_sampled_vertices_have_the_busiest():
    places = torch.tensor([5, 5, 5, 1, 999])
    found = oracle.sampled(places, 1000).tolist()
    assert {0, 5, 999} <= set(found)
    assert found == sorted(set(found))


@pytest.mark.parametrize("kind", oracle.SIDES)
def test_pyg_attention_is_that_of_the_oracle(kind, small):
    pytest.importorskip("torch_geometric")
    ours = cases.Attention(kind, Graph(small), HEADS, FEAT)
    ends = cases.ends_of(small)
    forward = partial(cases.pyg_attention, kind, ends, ours.inputs)
    found = dict(zip(("out", *ours.inputs), ours.both(forward), strict=True))
    errors = oracle.Exact(kind, ends, ours.inputs, ours.grad).errors(found)
    assert oracle.complaint(errors, torch.float32) is None


def test_limits_of_products_are_those_of_the_other_benchmarks():
    assert oracle.LIMITS is _oracle.LIMITS
