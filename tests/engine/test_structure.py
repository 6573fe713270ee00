"""What is prepared once of a structure."""

import numpy as np

from sparsefmt.ops.engine import build
from sparsefmt.ops.engine.structure import MAX_SHARED, Sizes, Structure


def structure(**changes):
    names = "n_rows n_cols nnz index_dtype indptr indices start slot cut long blocks n_cuts n_long"
    return Structure(**dict.fromkeys(names.split(), 1) | changes)


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
    assert not any(
        other is of_S for other in (of_large, of_alone, S.cases_of("sddmm", lambda _: 0))
    )
    asked = []

    def question(at, feat):
        asked.append(at)
        return feat

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
    assert hash(S) == hash(T)
    assert repr(S) == repr(T)


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
