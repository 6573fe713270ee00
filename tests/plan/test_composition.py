"""Expressions, their forests and what pruning leaves: the paper's counts, and laws of the values.

Every tree is run on arrays in float64 and compared with the product of dense matrices.
"""

from functools import partial, reduce
from operator import matmul

import numpy as np
import pytest
from op_cases import matrix

from sparsefmt import COO, ops
from sparsefmt.errors import ShapeError
from sparsefmt.plan import models
from sparsefmt.plan.expression import (
    Apply,
    Broadcast,
    Hop,
    Leaf,
    Product,
    Sum,
    factored,
    product,
    simplified,
    total,
)
from sparsefmt.plan.forest import forest
from sparsefmt.plan.pruning import ORDERS, judged, signature
from sparsefmt.plan.rules import FUSED, PAPER, steps, text_of
from sparsefmt.plan.run import ARRAY_FUNCTIONS, run

H = models.features()
MODELS = {
    "gcn": models.gcn(H),
    "gat": models.gat(H),
    "gat with open scores": models.gat(H, opened=True),
    "sgc": models.sgc(H, 3),
    "tagcn": models.tagcn(H, 2),
    "gin": models.gin(H),
    "sage": models.sage(H),
}


def promoted(expression, rules, orders=ORDERS, **options):
    return [v for v in judged(forest(expression, rules), orders, **options) if v.promoted]


# What the paper counts


@pytest.mark.parametrize(
    ("model", "rules", "generated", "narrowing", "widening"),
    [("gcn", PAPER, 12, 2, 2), ("gcn", FUSED, 24, 3, 3), ("gat", PAPER, 2, 1, 2)],
)
def test_as_many_trees_are_generated_and_promoted_as_in_the_paper(
    model, rules, generated, narrowing, widening
):
    found = judged(forest(MODELS[model], rules))
    assert len(found) == generated
    widens, narrows = zip(*(v.beaten_by for v in found), strict=True)
    assert (narrows.count(None), widens.count(None)) == (narrowing, widening)


def test_gcn_keeps_one_precomputed_and_one_dynamic_tree_for_each_order_of_the_widths():
    found = {text_of(v.tree) for v in promoted(MODELS["gcn"], PAPER)}
    assert found == {"((D·A·D)·H)·W", "(D·(A·(D·H)))·W", "(D·A·D)·(H·W)", "D·(A·(D·(H·W)))"}


def test_gat_reuses_the_product_for_its_scores_or_computes_it_twice():
    again, reuse = map(text_of, forest(MODELS["gat"]))
    assert (reuse, again) == ("attention(H·W)·(H·W)", "(attention(H·W)·H)·W")
    kinds = [p.kind for p in signature(forest(MODELS["gat"])[1])]
    assert kinds.count("gemm") == 1  # one value, though written twice


# What trees compute


def leaves(kind="power law", rows_in=5, rows_out=3):
    """Arrays behind the names: a graph that is not symmetric, with hubs and empty rows."""
    entries = matrix(kind, np.float64, np.int32)
    n = max(entries.shape)
    A = COO(entries.row, entries.col, shape=(n, n)).tocsr()
    rng = np.random.default_rng(3)
    widths = {"H": (n, rows_in), "W": (rows_in, rows_out), "V": (rows_in, rows_out)}
    widths |= {f"W{k}": (rows_in, rows_out) for k in range(3)}
    values = {name: rng.standard_normal(shape) for name, shape in widths.items()}
    values |= {name: rng.standard_normal((rows_out, 1)) for name in "ab"}
    return values | {"D": rng.random(n) + 0.5, "A": A, "B": A.with_data(rng.random(A.nnz))}


def attention(A, **arguments):
    """Softmax of dot products of a matrix with itself, or of the sums of two vectors."""
    left, right = (*arguments.values(), *arguments.values())[:2]  # a matrix alone is both
    left, right = left[A.tocoo().row], right[A.indices]
    scores = (left * right).sum(1) if len(arguments) == 1 else (left + right)[:, 0]
    return A.with_data(ops.edge_softmax(A, scores))


def dense(expression, matrix_of, function):
    """Compute an expression by dense products alone, of leaves and functions as matrices."""
    match expression:
        case Leaf():
            return matrix_of(expression)
        case Product(parts) | Hop(parts):
            return reduce(matmul, [dense(part, matrix_of, function) for part in parts])
        case Sum(parts):
            return sum(dense(part, matrix_of, function) for part in parts)
        case Apply(arguments=parts):
            return function(*[dense(part, matrix_of, function) for part in parts])


def expected_of(expression, values):
    """Compute an expression of these arrays."""

    def matrix_of(leaf):
        value = values[leaf.name]
        if leaf.kind == "diagonal":
            return np.diag(value)
        return value if leaf.kind == "dense" else value.toarray()

    def function(*parts):
        return attention(values["A"], **{str(i): part for i, part in enumerate(parts)}).toarray()

    return dense(expression, matrix_of, function)


@pytest.mark.parametrize("rules", [PAPER, FUSED], ids=["paper", "fused"])
@pytest.mark.parametrize("kind", ["power law", "isolated rows", "star", "empty"])
@pytest.mark.parametrize("model", MODELS)
def test_every_tree_computes_the_expression(model, kind, rules):
    values = leaves(kind)
    expected = expected_of(MODELS[model], values)
    scale = max(1.0, np.abs(expected).max(initial=0))
    functions = {**ARRAY_FUNCTIONS, "attention": partial(attention, values["A"])}
    for tree in forest(MODELS[model], rules):
        found = run(tree, values, functions)
        assert np.abs(found - expected).max(initial=0) <= 1e-12 * scale, text_of(tree)


def test_equal_steps_run_once():
    calls = []

    def gemm(left, right):
        calls.append(left.shape)
        return left @ right

    values = leaves()
    functions = {**ARRAY_FUNCTIONS, "gemm": gemm, "attention": partial(attention, values["A"])}
    run(forest(MODELS["gat"])[1], values, functions)
    assert len(calls) == 1


# Laws of expressions


def test_broadcasts_become_diagonals_and_nested_products_one_chain():
    D, A, W = models.degrees(), models.graph(), models.weight()
    written = Product((Broadcast(D, Product((A, Broadcast(D, H)))), W))
    assert simplified(written) == models.gcn(H)
    column = Leaf("c", "diagonal", "in", "in")
    assert simplified(Broadcast(column, H, "cols")) == Product((H, column))


def test_horner_multiplies_by_each_hop_once():
    trees = forest(models.tagcn(H, 3))
    hops = [sum(p.kind == "spmm_scaled" for p in signature(tree)) for tree in trees]
    assert min(count for count in hops if count) == 3
    assert str(factored(models.tagcn(H, 2))).count("A") == 2
    expression = simplified(MODELS["sage"])  # a sum without a common factor
    assert factored(expression) == expression


def test_matrices_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ShapeError, match="W has in rows"):
        product(models.graph(), models.weight())
    with pytest.raises(ShapeError, match="one shape"):
        total(H, models.weight())


# Laws of pruning


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_pruned_is_beaten_by_a_tree_that_is_left(model, training):
    for sizes in ORDERS:
        found = judged(forest(MODELS[model]), (sizes,), training=training)
        left = [v.tree for v in found if v.promoted]
        again = judged(left, (sizes,), training=training)
        assert left
        assert all(v.promoted for v in again)
        for verdict in found:
            if not verdict.promoted:
                beside = judged([verdict.tree, *left], (sizes,), training=training)
                assert not beside[0].promoted


def test_trees_of_equal_primitives_do_not_beat_each_other():
    trees = forest(models.gcn(H), PAPER)
    equal = ({"in": 2, "out": 2},)
    assert sum(v.promoted for v in judged(trees, equal)) >= 4


def test_training_prices_gradients_only_where_they_flow():
    first = forest(models.gin(models.features(constant=True)))[0]
    assert text_of(first) == "(B·H)·W"
    kinds = [p.kind for p in signature(first, training=True)]
    assert kinds == ["spmm_unweighted", "gemm", "gemm"]  # and W's gradient, but not H's
    kinds = [p.kind for p in signature(forest(models.gin(H))[0], training=True)]
    assert sorted(kinds) == ["gemm"] * 3 + ["spmm_unweighted"] * 2


def test_steps_of_constants_alone_are_constant():
    trees = forest(models.gcn(models.features(constant=True)))
    tree = next(t for t in trees if text_of(t).endswith("·W"))
    *before, last = steps(tree)
    assert all(step.constant for step in before)
    assert not last.constant
