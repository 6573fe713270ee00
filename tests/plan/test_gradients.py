"""Every composition of every model on tensors: its value and all gradients, in float64."""

import pytest

torch = pytest.importorskip("torch")

import test_composition  # noqa: E402
from autograd_cases import make_graph  # noqa: E402
from test_composition import dense  # noqa: E402

from sparsefmt import Graph  # noqa: E402
from sparsefmt.model.program import FUNCTIONS, Attention, Program, Weighted  # noqa: E402
from sparsefmt.plan import models  # noqa: E402
from sparsefmt.plan.expression import Leaf, Product  # noqa: E402
from sparsefmt.plan.forest import forest  # noqa: E402
from sparsefmt.plan.rules import text_of  # noqa: E402

N = 24
MODELS = {
    **test_composition.MODELS,
    "gcn, weighted": models.gcn(models.features(), models.graph(weighted=True)),
    "gcn, first layer": models.gcn(models.features(constant=True)),
}
#: Entries of the graph: none, few, and rows of many beside empty ones.
ENTRIES = (0, 30, 200)


def values(entries, *, weighted):
    """Tensors behind the names, all with gradients but the graph's."""
    generator = torch.Generator().manual_seed(entries)

    def tensor(*shape):
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        return made.requires_grad_()

    A = make_graph(N, N, entries, weighted=weighted, seed=entries)
    widths = {"H": (N, 5), **{name: (5, 3) for name in ("W", "V", "W0", "W1", "W2")}}
    found = {name: tensor(*shape) for name, shape in widths.items()}
    B = Graph(A.csr.with_data(torch.rand(A.nnz, generator=generator).double().numpy()))
    return {**found, "a": tensor(3, 1), "b": tensor(3, 1), "D": tensor(N), "A": A, "B": B}


def matrix(graph):
    return torch.from_numpy(graph.csr.toarray()).double()


def functions(given):
    """With attention by scores, or by those that two vectors make of a matrix."""

    def attention(argument0, argument1=None):
        scores = (argument0, argument1)
        if argument1 is None:
            scores = (argument0 @ given["a"], argument0 @ given["b"])
        return Attention(given["A"], *(score[:, 0] for score in scores), {})

    return {**FUNCTIONS, "attention": attention}


def expected_of(expression, given):
    """Compute an expression of these tensors by dense products alone."""

    def matrix_of(leaf):
        value = given[leaf.name]
        if isinstance(value, Graph):
            return matrix(value)
        return torch.diag(value) if leaf.kind == "diagonal" else value

    def attention(left, right=None):
        el, er = (left @ given["a"], left @ given["b"]) if right is None else (left, right)
        stored = matrix(given["A"])  # how often each edge is there
        weight = stored * torch.nn.functional.leaky_relu(er + el.T, 0.2).exp()
        return weight / weight.sum(1, keepdim=True).clamp(min=1e-300)

    return dense(expression, matrix_of, attention)


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("model", MODELS)
def test_every_tree_has_the_value_and_the_gradients_of_the_expression(model, entries):
    expression = MODELS[model]
    given = values(entries, weighted=model == "gcn, weighted")
    if model == "gcn, first layer":
        given = {**given, "H": given["H"].detach(), "D": given["D"].detach()}
    asked = [one for one in given.values() if isinstance(one, torch.Tensor) and one.requires_grad]
    expected = expected_of(expression, given)
    out = torch.randn(expected.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((expected * out).sum(), asked, allow_unused=True)
    if "first" not in model:  # D is learned here, and nothing made of it is constant
        expression = learned(expression)
    for tree in forest(expression):
        y = Program(tree)(given, functions(given))
        found = torch.autograd.grad((y * out).sum(), asked, allow_unused=True)
        for one, two in zip((y, *found), (expected, *gradients), strict=True):
            assert (one is None) == (two is None), text_of(tree)
            if one is not None:
                torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10, msg=text_of(tree))


def learned(expression):
    """Ask for the gradient of the diagonals."""
    from sparsefmt.model.composition import leaves_of, rebuilt

    leaves = {leaf.name: leaf for leaf in leaves_of(expression)}
    D = Leaf("D", "diagonal", "n", "n", grad=True)
    return rebuilt(expression, {**leaves, **({"D": D} if "D" in leaves else {})})


def test_what_is_kept_is_computed_once_and_again_when_its_tensors_change():
    given = {n: v.detach() if n in "HD" else v for n, v in values(200, weighted=False).items()}
    expression = models.gcn(models.features(constant=True))
    tree = next(t for t in forest(expression) if text_of(t) == "(D·A·D·H)·W")
    calls = []

    def spmm_scaled(**operands):
        calls.append(operands)
        return FUNCTIONS["spmm_scaled"](**operands)

    program, counted = Program(tree), {**FUNCTIONS, "spmm_scaled": spmm_scaled}
    for expected in (1, 1, 2, 2, 3, 3, 4, 4):
        if len(calls) < expected and calls:
            if expected == 2:
                given["H"].mul_(2)
            elif expected == 3:
                given["H"].data = 3 * given["H"]
            else:
                given["H"] = given["H"].clone() + 1
        y = program(given, counted)
        assert len(calls) == expected
        torch.testing.assert_close(y, expected_of(expression, given), rtol=1e-10, atol=1e-10)


def test_a_result_that_is_kept_may_be_written_to():
    given = {n: v.detach() if n in "HD" else v for n, v in values(30, weighted=False).items()}
    D, A = models.degrees(), models.graph()
    program = Program(forest(Product((D, A, D, models.features(constant=True))))[0])
    first = program(given, FUNCTIONS).clone()
    program(given, FUNCTIONS).zero_()
    assert torch.equal(program(given, FUNCTIONS), first)


def test_scaled_entries_multiply_in_the_dtype_of_their_factors():
    d = torch.rand(N)
    made = FUNCTIONS["scale_entries"](A=make_graph(N, N, 60), row=d, col=d)
    assert isinstance(made, Weighted)
    assert made.values.dtype == torch.float32
