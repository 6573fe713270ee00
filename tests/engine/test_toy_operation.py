"""How an operation enters the house: a toy, which docs/architecture.md shows and explains.

``Y[i, f] = deg(i) * X[i, f]``, where ``deg(i)`` is the number of entries of row i.  In a room its
parts are in files of their own, as ``PLACES`` has them; the last test puts them there, in a copy of
the package.  Here the row is in the table only while the tests of this module run.
"""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt import CSR
from sparsefmt.errors import ShapeError, UnsupportedError
from sparsefmt.formats.oracle import assert_close, stored_entries
from sparsefmt.ops.engine import table
from sparsefmt.ops.engine.bind import bind
from sparsefmt.ops.engine.call import call, convert_to_csr
from sparsefmt.ops.engine.structure import Sizes
from sparsefmt.ops.engine.table import Arg, Kernel, Op, Price
from sparsefmt.testing import csr, features


def degree_scaled(A, X, *, out=None):
    """``Y[i, f] = deg(i) * X[i, f]``, where ``deg(i)`` is the number of entries of row i."""
    A, X, out = bind(table.find("toy_degree_scaled"), A, X=X, out=out)
    return call(table.find("toy_degree_scaled"), A, X, out=out)


def make_row():
    """The row; a room makes its rows when it is imported: ``DEGREE_SCALED = Op(...)``."""
    return Op(
        "toy_degree_scaled",
        (Arg("x", "rows", (2,), also=("X",)),),
        kernels=(
            Kernel("toy_numpy", scale_on_cpu, ("csr",), "cpu", refuses=half_precision),
            convert_to_csr("toy_degree_scaled"),
        ),
        results=lambda S, X: ((X.shape, X),),
        price=lambda S, X: Price(bytes=2 * X.nbytes + 8 * S.n_rows, flops=X.size),
    )


def half_precision(A, X, **_):
    """Reasons against the kernel."""
    return ["float16 has no loop here"] if X.dtype == np.float16 else []


def scale_on_cpu(A, X, *, out=None):
    """The kernel: ``A`` is a CSR of NumPy arrays, everything is checked."""
    return np.multiply(X, A.lengths[:, None].astype(X.dtype), out=out)


def oracle(A, X):
    """Entry by entry, in float64."""
    Y = np.zeros(X.shape)
    for i, _, _ in stored_entries(A):
        Y[i] += X[i]
    return Y


@pytest.fixture(scope="module")
def row():
    """The row, in the table for as long as this module needs it."""
    yield make_row()
    del table._operations["toy_degree_scaled"]


@given(data=st.data())
def test_the_operation_is_its_oracle_in_every_format(row, data):
    A = data.draw(csr(weighted=False))
    X = data.draw(features(A.n_rows, dtype="float32"))
    expected = oracle(A, X)
    # One product of a whole number and a float32: rounded once.
    bound = np.finfo(np.float32).eps * np.abs(expected)
    for format in ("csr", "coo", "csc"):
        assert_close(degree_scaled(A.asformat(format), X), expected, bound=bound)


def test_a_call_asks_only_kernels_of_its_format_and_place(row):
    def names(format, *, gpu):
        return [kernel.name for kernel in row.candidates[format, gpu]]

    assert names("csr", gpu=False) == ["toy_numpy", "toy_degree_scaled_through_csr"]
    assert names("coo", gpu=False) == names("csr", gpu=True) == ["toy_degree_scaled_through_csr"]


def test_a_call_that_no_kernel_takes_lists_the_reasons(row):
    A = CSR([0, 2, 3], [0, 1, 1], shape=(2, 2))
    with pytest.raises(UnsupportedError, match="not toy_numpy: float16 has no loop here"):
        degree_scaled(A, np.ones((2, 3), np.float16))
    with pytest.raises(ShapeError, match="X has 3 rows but A has 2 rows"):
        degree_scaled(A, np.ones((3, 3)))


def test_shapes_and_price_follow_from_sizes_alone(row):
    S, X = Sizes(n_rows=2, n_cols=2, nnz=3, index_dtype="int32"), np.ones((2, 5), np.float32)
    ((shape, like),) = row.results(S, X)
    assert shape == (2, 5)
    assert like is X
    assert row.price(S, X) == Price(bytes=2 * 40 + 16, flops=10)


UPSTAIRS = '''
DEGREE_SCALED = LibraryOp("toy_degree_scaled")


def degree_scaled(graph, x):
    """``ops.degree_scaled``, differentiably any number of times."""
    return _DegreeScaled.apply(x, tensors_of(graph, x))


class _DegreeScaled(Function):
    @staticmethod
    def forward(ctx, x, tensors):
        ctx.tensors = tensors
        return DEGREE_SCALED(tensors.rows, x)

    @staticmethod
    def backward(ctx, grad):
        return _DegreeScaled.apply(grad, ctx.tensors.current()), None
'''


def source(*functions):
    return "\n\n".join(["", *map(inspect.getsource, functions)])


API = "import numpy as np\nfrom ..engine import table\nfrom .cpu import scale_on_cpu\n"
API += source(degree_scaled, make_row, half_precision) + "\n\nDEGREE_SCALED = make_row()\n"
#: File -> what the operation adds to it.
PLACES = {
    "ops/matmul/oracle.py": source(oracle),
    "ops/matmul/api.py": API,
    "ops/matmul/cpu.py": source(scale_on_cpu),
    "autograd/matmul.py": UPSTAIRS,
}
#: What a kernel on a GPU needs besides.
ON_A_GPU = {"ops/matmul/cuda.py", "ops/matmul/degree_scaled.cu"}
#: Lists of public names -> the module whose line there gets the name.
LISTS = {"ops/__init__.py": "matmul.api", "autograd/__init__.py": "matmul"}
USE = """
import numpy as np, torch
from sparsefmt import Graph, autograd, ops
from sparsefmt.ops.matmul.oracle import oracle

graph = Graph.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), num_nodes=2)
x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
expected = oracle(graph.csr, x.detach().numpy())
np.testing.assert_allclose(ops.degree_scaled(graph.csr, x.detach().numpy()), expected)
np.testing.assert_allclose(autograd.degree_scaled(graph, x).detach(), expected)
assert torch.autograd.gradgradcheck(lambda x: autograd.degree_scaled(graph, x) ** 2, x)
compiled = torch.compile(autograd.degree_scaled, backend="aot_eager", fullgraph=True)
np.testing.assert_allclose(compiled(graph, x).detach(), expected)
"""


@pytest.mark.slow
def test_an_operation_touches_few_files_in_two_folders(tmp_path):
    """It is public, differentiable and compilable after changes to them alone."""
    pytest.importorskip("torch")
    original = Path(__file__).resolve().parents[2] / "sparsefmt"
    copy = tmp_path / "sparsefmt"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__", "*.nb[ci]"))
    for file, text in PLACES.items():
        with (copy / file).open("a", encoding="utf-8") as end:
            end.write(text)
    for file, module in LISTS.items():
        head, line, rest = (copy / file).read_text(encoding="utf-8").partition(f'"{module}": "')
        (copy / file).write_text(f"{head}{line}degree_scaled {rest}", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", USE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    files = [path for path in original.rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    names = [path.relative_to(original).as_posix() for path in files]
    changed = {
        name for name in names if (original / name).read_bytes() != (copy / name).read_bytes()
    }
    assert changed == {*PLACES, *LISTS}
    written = {*PLACES, *ON_A_GPU, "autograd/__init__.py"}
    assert len(written) <= 7
    assert {Path(name).parent.as_posix() for name in written} == {"ops/matmul", "autograd"}
    assert {*changed, *ON_A_GPU} - written == {"ops/__init__.py"}  # one line more
