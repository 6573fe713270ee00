"""The one path to a kernel: a case is prepared once, launched with its addresses, and explained."""

import contextlib
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

from sparsefmt.errors import UnsupportedError
from sparsefmt.ops.engine import build, table
from sparsefmt.ops.engine import call as engine
from sparsefmt.ops.engine.call import Launcher, Prepared, Result, call, launcher
from sparsefmt.ops.engine.explain import explaining
from sparsefmt.ops.engine.memory import CupyMemory, Scalar, register_memory
from sparsefmt.ops.engine.structure import MAX_SHARED, Sizes, Structure
from sparsefmt.ops.engine.table import Kernel, Op


class Array:
    """Memory at an address, of so many features."""

    def __init__(self, address, width=4, gpu=0):
        self.address, self.width, self.gpu = address, width, gpu


class Memory:
    current = 0

    def case(self, args, names=()):
        arrays = [isinstance(a, Array) for a in args]
        values = [type(a) if isinstance(a, Scalar) else a for a in args]
        facts = (a.width if is_one else a for a, is_one in zip(values, arrays, strict=True))
        addresses = [getattr(a, "address", a if type(a) is Scalar else 0) for a in args]
        return args[0].gpu != self.current, (*names, *facts), addresses, 99

    def empty(self, shape, dtype, like):
        return Array(1000 if dtype == "uint8" else 2000, shape)

    allocate = empty

    def address(self, a):
        return a.address

    @contextlib.contextmanager
    def on_device(self, a):
        before, self.current = self.current, a.gpu
        yield
        self.current = before


register_memory(Array, Memory())


def structure(**changes):
    names = "n_rows n_cols nnz index_dtype indptr indices start slot cut long blocks n_cuts n_long"
    return Structure(**{name: k for k, name in enumerate(names.split(), 1)} | changes)


@pytest.fixture
def row(monkeypatch):
    """A row of two kernels, what was prepared, and what was launched."""
    monkeypatch.setattr(table, "_operations", {})
    asked, prepared, launched = [], [], []

    def prepare(S, m, x, scale=None, reduce="sum", *, out=None):
        prepared.append((x.width, reduce))
        if x.width == 3:
            return lambda S, x, *args, **options: call(made, S, Array(x.address, 4), *args)
        names = "indptr", "x", "scale", "workspace_end", "out", "nnz"
        launch = lambda *args: launched.append(args)  # noqa: E731
        return Prepared(((launch, names),), (Result((x.width,), "float32"),), (8, 16))

    def refuses(S, x, *_, **__):
        asked.append(x.width)
        return ["it is narrow"] if x.width < 8 else []

    wide = Kernel("wide", lambda S, x, *_, **__: "wide", ("csr",), "gpu", refuses=refuses)
    kernel = Kernel("prepared", Launcher(prepare, lambda S: S.nnz > 100), ("csr",), "gpu")
    made = Op("toy", (), results=lambda *_: (), kernels=(wide, kernel), library=False)
    return made, asked, prepared, launched


def test_a_case_is_prepared_once_and_launched_with_its_addresses(row):
    made, asked, prepared, launched = row
    S = structure()
    for address in (10, 20):
        out = call(made, S, Array(address), Array(7), "mean")
        assert (out.address, out.width) == (2000, (1, 4))
    call(made, S, Array(10), None, "mean", out=Array(5))
    assert prepared == [(4, "mean")] * 2  # with a scale, and without
    assert asked == [4] * 2
    assert launched == [
        (99, 5, 10, 7, 1008, 2000, 3),
        (99, 5, 20, 7, 1008, 2000, 3),
        (99, 5, 10, 0, 1008, 5, 3),
    ]


def test_cases_without_end_are_not_all_kept(row, monkeypatch):
    monkeypatch.setattr(engine, "MAX_CASES", 3)
    made, _, prepared, launched = row
    S = structure()
    for slope in (0.1, 0.2, 0.3, 0.4, 0.4):
        call(made, S, Array(10), None, slope)
        assert all(len(cases) <= 3 for cases in S.cases.values())
    assert prepared == [(4, slope) for slope in (0.1, 0.2, 0.3, 0.4)]
    assert len(launched) == 5


def test_structures_that_are_alike_share_what_was_prepared(row):
    made, _, prepared, launched = row
    S, T, large = structure(), structure(indptr=50), structure(nnz=1000)
    S.shared = T.shared = large.shared = {}
    for one in (S, T, large, T):
        call(made, one, Array(10))
    assert len(prepared) == 2  # sizes tell the large one apart
    assert [args[1] for args in launched] == [5, 50, 5, 50]


def test_another_kernel_and_another_step_first(row):
    made, asked, prepared, launched = row
    S = structure()
    assert [call(made, S, Array(10, 8)) for _ in range(2)] == ["wide"] * 2
    assert asked == [8, 8]  # what prepares nothing is chosen at each call
    for _ in range(2):
        call(made, S, Array(30, 3))
    assert prepared == [(3, "sum"), (4, "sum")]
    assert [args[2] for args in launched] == [30, 30]


def test_arrays_on_another_gpu_are_launched_there(row):
    made, _, prepared, launched = row
    call(made, structure(), Array(10, gpu=1))
    assert len(prepared) == len(launched) == 1


def test_a_call_on_another_gpu_is_explained_once(row):
    with explaining() as explanations:
        call(row[0], structure(), Array(10, gpu=1))
    assert [one.chosen.name for one in explanations] == ["prepared"]


def test_results_have_rows_of_their_own_and_scalars_no_case():
    prepared, launched = [], []

    @launcher()
    def toy(S, m, x, seed):
        prepared.append(x.width)
        results = Result((2,), "int32", "nnz"), Result((), "float32", "n_cols")
        launch = lambda *args: launched.append(args)  # noqa: E731
        return Prepared(((launch, ("x", "out_1", "seed")), (launch, ("out",))), results)

    S = structure()
    for seed in (7, 8):
        columns, data = toy(S, Array(10), Scalar(seed))
        assert (columns.width, data.width) == ((3, 2), (2,))
    assert prepared == [4]
    assert launched == [(99, 10, 2000, 7), (99, 2000), (99, 10, 2000, 8), (99, 2000)]


def test_features_alone_are_prepared_for_their_number_of_rows():
    class Features(Array):
        shape = (5, 4)

    register_memory(Features, Memory())
    counts = []

    @launcher()
    def toy(S, m, x):
        counts.append(S.n_rows)
        return Prepared((), (Result((2,), "int32"),))

    assert [toy(None, Features(10)).width for _ in range(2)] == [(5, 2)] * 2
    assert counts == [5]


def test_tiles_are_asked_for_at_each_call(row, monkeypatch):
    made, asked, prepared, launched = row
    S = structure()
    call(made, S, Array(10))
    monkeypatch.setattr(engine, "all_tiles", {1})
    monkeypatch.setattr(engine, "has_tiles", lambda S: True)
    for _ in range(2):
        call(made, S, Array(10))
    assert asked == [4] * 3
    assert len(prepared) == 2  # by the row, and by the kernel itself
    assert len(launched) == 3


def test_what_runs_is_explained_though_it_was_prepared(row):
    made, S = row[0], structure()
    call(made, S, Array(10))
    with explaining() as explanations:
        call(made, S, Array(10))
    assert [one.chosen.name for one in explanations] == ["prepared"]
    assert [reason for _, reason in explanations[0].rejected] == ["it is narrow"]


def test_a_call_that_all_kernels_refuse_names_their_reasons(row):
    only = Op("toy", (), results=lambda *_: (), kernels=row[0].kernels[:1], library=False)
    with pytest.raises(UnsupportedError, match=r"no kernel can run this toy[^?]*it is narrow"):
        call(only, structure(), Array(10))


class OfCupy:
    """What ``CupyMemory`` reads of an array."""

    def __init__(self, a):
        self.data = SimpleNamespace(device_id=0, ptr=a.ctypes.data)
        self.dtype, self.shape, self.strides = a.dtype, a.shape, a.strides
        self._c_contiguous = a.flags.c_contiguous


def of_cupy(_):
    """Return CuPy's memory, and a class of what it takes for arrays."""
    memory = CupyMemory.__new__(CupyMemory)
    memory._array, memory._current_device = OfCupy, int
    memory._current_stream = lambda: SimpleNamespace(ptr=0)
    return memory, OfCupy


def of_torch(monkeypatch):
    """Return torch's memory, and a function that makes a tensor of an array."""
    torch = pytest.importorskip("torch")
    memory = import_module("sparsefmt.autograd.engine.memory")
    for name in ("raw_stream", "current_device", "bf16_is_allowed"):
        monkeypatch.setattr(memory, name, lambda *_: 0)
    return memory, torch.from_numpy


@pytest.mark.parametrize("library", [of_cupy, of_torch])
def test_calls_that_a_kernel_would_see_apart_are_cases_apart(library, monkeypatch):
    memory, seen = library(monkeypatch)
    room = np.zeros(4096, np.uint8)
    room = room[-room.ctypes.data % 64 :]

    def array(*shape, dtype="float32", at=0):
        return np.ndarray(shape, dtype, room, at)

    def case(*args, names=()):
        args = [seen(a) if isinstance(a, np.ndarray) else a for a in args]
        return getattr(memory, "MEMORY", memory).case(args, names)[1]

    x = array(4, 6)
    others = array(4, 5), array(4, 2, 3), array(4, 3, 2), array(24), array(4, 6, dtype="float64")
    lying = [array(4, 12)[:, ::2], array(4, 8)[:, :6], array(4, 8)]
    lying += [array(4, 6, at=place) for place in (4, 8)]
    options = (None, "mean"), (x, "sum"), (0.5, "sum")
    cases = [case(a, None, "sum") for a in (x, *others, *lying)]
    cases += [case(x, *args) for args in options] + [case(x, None, "sum", names=("out",))]
    if library is of_torch:
        for switch in ("_deterministic", "bf16_is_allowed"):
            with monkeypatch.context() as patch:
                patch.setattr(memory, switch, lambda: True)
                cases.append(case(x, None, "sum"))
    assert len(set(cases)) == len(cases)
    assert case(array(9, 6, at=64), None, "sum") == cases[0]  # rows and places are not asked


def test_a_transpose_that_is_cut_otherwise_is_another_case():
    memory, some, first = Memory(), structure(), Launcher(lambda S, m, x: None)
    memory.pointer = memory.address
    cases = []
    for T in (some, structure(blocks=99), structure(n_cuts=99), structure(nnz=99)):
        args, case, *_ = engine._transpose_first(first, memory, some, (T, Array(7)), ())
        assert args[0] is T
        cases.append(case)
    assert len(set(cases)) == 3


def test_a_case_is_prepared_once_for_each_structure_and_question():
    asked = []

    def first(S, *case):
        asked.append((S, *case))
        return len(asked)

    def second(S, *case):
        return "another question"

    S, T = structure(), structure(nnz=2)
    assert [S.prepared(first, "float32", 64) for _ in range(3)] == [1] * 3
    assert S.prepared(first, "float32", 128) == 2
    assert T.prepared(first, "float32", 64) == 3
    assert S.prepared(second, "float32", 64) == "another question"
    assert asked == [(S, "float32", 64), (S, "float32", 128), (T, "float32", 64)]


def test_structures_of_about_one_size_share_what_depends_on_neither_size_nor_place():
    S, T, large, alone = structure(), structure(nnz=2, indptr=4096), structure(nnz=99), structure()
    S.shared = T.shared = large.shared = {}
    of_S, of_T, of_large, of_alone = (
        one.cases_of("spmm", lambda at: at.nnz > 9) for one in (S, T, large, alone)
    )
    assert of_S is of_T is S.cases["spmm"]
    others = of_large, of_alone, S.cases_of("sddmm", lambda _: 0)
    assert all(other is not of_S for other in others)
    asked = []
    question = lambda at, feat: asked.append(at) or feat  # noqa: E731
    for one in (S, T, S):
        one.prepared(question, 64)
    assert asked == [S, T]  # each by itself


def test_structures_laid_out_alike_share_wherever_they_lie(monkeypatch):
    monkeypatch.setattr(build, "multiprocessors", lambda device: 2)
    lay_out = build.layout.__wrapped__  # none of these devices' layouts is to be remembered
    here, there = (lay_out(1000, 1000, 8192, "int64", device) for device in (0, 1))
    sizes = Sizes(1000, 1000, 8000, "int64"), Sizes(999, 999, 7999, "int64")
    S, T = (build.structure_in(here, 4096 * k, sizes[k], None) for k in (0, 1))
    uncut = build.structure_in(here, 0, sizes[0], None, cuts=False)
    other = build.structure_in(there, 0, sizes[0], None)
    found = [id(one.cases_of("spmm", lambda _: ())) for one in (S, T, uncut, other, S)]
    assert found[0] == found[1] == found[4]
    assert len({*found}) == 3  # another GPU has kernels of its own
    assert S.n_cuts
    assert not uncut.n_cuts


def test_what_was_prepared_is_no_part_of_a_structure():
    S, T = structure(), structure()
    S.prepared(lambda *_: "prepared")
    assert S == T
    assert (hash(S), repr(S)) == (hash(T), repr(T))


def test_structures_alike_of_sizes_without_end_do_not_all_keep_what_was_prepared():
    shared = {}
    for n in range(3 * MAX_SHARED):
        S = structure(n_rows=n)
        S.shared = shared
        S.cases_of("gat", lambda S: S.n_rows)["case"] = n
        assert S.cases == {"gat": {"case": n}}
        assert len(shared) <= MAX_SHARED


def test_there_is_room_for_a_few_more():
    counts = np.arange(5000)
    rooms = np.array([build.room_for(int(count)) for count in counts])
    assert (rooms[:17] == counts[:17]).all()
    assert (rooms >= counts).all()
    assert (rooms <= 1.125 * counts).all()
    assert len(set(rooms[1024:2048])) == 9
