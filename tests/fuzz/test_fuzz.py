"""The fuzzer and the soak run, what they kept still holds, and they see what they look for."""

import numpy as np
import readers
import torch
from calls import Everything
from devices import LAYOUTS, host, laid_out, poison
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from sparsefmt import CSR, ops

SMOKE = settings(
    max_examples=40, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_what_was_kept_is_read_or_refused(tmp_path):
    size = readers.CORPUS.stat().st_size
    assert 0 < size <= readers.CORPUS_BYTES
    for file in readers.corpus():
        readers.outcome(tmp_path, file, {"format": None, "max_bytes": 2**24})


def test_mutated_files_are_read_or_refused(tmp_path):
    """Of every kind but Planetoid's other parts, which ``test_io_planetoid`` mutates."""

    @settings(SMOKE, max_examples=600)
    @given(readers.files(), readers.OPTIONS)
    def law(file, options):
        readers.outcome(tmp_path, file, options)

    law()


def test_a_sequence_of_calls_agrees_with_the_oracles(one_thread):
    options = settings(SMOKE, max_examples=3, stateful_step_count=8)
    with poison("cpu"):
        run_state_machine_as_test(seed(3)(Everything), settings=options)


def test_layouts_hold_the_same_numbers():
    for shape in [(4, 3), (0, 3), (4, 0), (2, 3, 5), (6,)]:
        made = np.random.default_rng(0).random(shape).astype(np.float32)
        for layout in LAYOUTS:
            assert np.array_equal(host(laid_out(made, layout, "cpu")), made)


def test_poison_shows_what_is_not_written():
    A = CSR([0, 1, 2], [0, 1], shape=(2, 2))
    with poison("cpu"):
        assert np.isnan(np.empty(3)).all()
        assert torch.empty(3).isnan().all()
        assert np.empty_like(A.indices)[0] == np.iinfo(A.index_dtype).max // 2
        assert not np.isnan(ops.spmm(A, np.ones((2, 3)))).any()
    assert np.empty.__module__ == "numpy"
