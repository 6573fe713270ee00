"""What is built once, for all that ask for it."""

import threading

import numpy as np
import pytest

from sparsefmt import CSR, SGT
from sparsefmt.formats.base import Built


def test_what_is_built_is_found_by_its_key():
    built, calls = Built(), []

    def build():
        calls.append(1)
        return "part"

    assert [built.ask("key", build) for _ in range(3)] == ["part"] * 3
    assert built.ask("another", lambda: 2) == 2
    assert calls == [1]
    assert sorted(built.items()) == [("another", 2), ("key", "part")]


def test_who_builds_may_decline_to_keep_it_or_fail():
    built = Built()
    with pytest.raises(MemoryError):
        built.ask("key", lambda: (_ for _ in ()).throw(MemoryError()))
    for part in (1, 2):
        assert built.ask("key", lambda part=part: part, keep=lambda made: made == 2) == part
    assert built.items() == [("key", 2)]


def test_who_waited_for_the_lock_finds_what_was_built_meanwhile():
    built, started, calls = Built(), threading.Event(), []

    def build():
        started.set()
        waiting.join(0.05)  # it is still waiting then
        calls.append(threading.current_thread().name)
        return "part"

    def ask():
        started.wait(60)
        calls.append(built.ask("key", lambda: "built twice"))

    waiting = threading.Thread(target=ask)
    waiting.start()
    assert built.ask("key", build) == "part"
    waiting.join()
    assert calls == [threading.main_thread().name, "part"]


def test_an_sgt_of_its_own_builds_its_csr_once():
    whole = CSR(np.array([0, 2, 3]), np.array([0, 2, 1]), np.ones(3), shape=(2, 3)).tosgt((16, 8))
    fields = {name: getattr(whole, name) for name in whole._array_fields}
    own = SGT(**fields, shape=whole.shape, tile=whole.tile)
    csr = own._structure()
    assert own._structure() is csr
    assert csr.indptr.tolist() == [0, 2, 3]
    assert csr.data is None
