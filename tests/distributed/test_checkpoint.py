"""Checkpoints: what is saved is loaded, and what would not be loaded is not saved."""

import os
import pickle
import stat
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from test_damage import rewritten

from sparsefmt.distributed.job import checkpoint as job_checkpoint
from sparsefmt.distributed.job.checkpoint import (
    check_writable,
    load_checkpoint,
    restore,
    save_checkpoint,
)
from sparsefmt.errors import FileFormatError, OutOfMemoryError, UnsupportedError


@pytest.fixture
def saved(tmp_path):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, module, optimizer, epoch=7, facts={"graph": "a", "seed": 1})
    return path, module, optimizer


def test_a_checkpoint_is_what_was_saved(saved):
    path, module, optimizer = saved
    found = load_checkpoint(path, facts={"graph": "a", "seed": 1})
    other = torch.nn.Linear(3, 2)
    again = torch.optim.Adam(other.parameters())
    assert restore(path, found, other, again) == 7
    assert torch.equal(other.weight, module.weight)
    ours, theirs = (one.state_dict()["state"][0]["exp_avg"] for one in (optimizer, again))
    assert torch.equal(ours, theirs)


def test_a_checkpoint_is_written_whole_or_not_at_all(saved, monkeypatch):
    path, module, optimizer = saved
    before = path.read_bytes()

    def full(state, stream):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left.*checkpoint\.pt"):
        save_checkpoint(path, module, optimizer, epoch=8, facts={})
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["graph", "seed"])
def test_a_checkpoint_of_another_training_is_refused(saved, name):
    with pytest.raises(FileFormatError, match=f"its {name} is .* without --resume"):
        load_checkpoint(saved[0], facts={"graph": "a", "seed": 1, name: "other"})


class Evil:
    def __reduce__(self):
        return os.remove, ("never called",)


def test_torch_refuses_what_the_first_look_at_a_pickle_would_let_through(saved, monkeypatch):
    path, *_ = saved
    rewritten(path, pickle.dumps(Evil(), protocol=2))
    monkeypatch.setattr(job_checkpoint.pickles, "load", lambda *_: None)
    with pytest.raises(FileFormatError, match=r"it is no checkpoint \(Weights only load failed"):
        load_checkpoint(path, facts={})


def test_a_checkpoint_and_its_name_reach_the_disk(saved, monkeypatch):
    path, module, optimizer = saved
    reached, sync = [], os.fsync

    def noted(number):
        reached.append(stat.S_ISDIR(os.fstat(number).st_mode))
        sync(number)

    monkeypatch.setattr(os, "fsync", noted)
    save_checkpoint(path, module, optimizer, epoch=8, facts={})
    assert reached == [False, True]  # the file, and the folder


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.pt", ""), ("", "it is a folder"), ("no/c.pt", r"no: no such folder for a checkpoint")],
)
def test_where_a_checkpoint_may_be_written(tmp_path, name, text):
    with pytest.raises(FileFormatError, match=text) if text else nullcontext():
        check_writable(tmp_path / name)
    assert not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsupportedError, match=r"pipe: it is a device, pipe or socket"):
        check_writable(tmp_path / "pipe")


@pytest.mark.parametrize("how", ["cut", "empty", "text", "pickle", "other", "list", "lacks"])
def test_a_damaged_checkpoint_is_refused(saved, how):
    path, *_ = saved
    if how == "pickle":
        path.write_bytes(pickle.dumps(Evil(), protocol=2))
    elif how in ("other", "list", "lacks"):
        torch.save({"other": {"a": 1}, "list": [1], "lacks": {"format": 1}}[how], path)
    else:
        data = path.read_bytes()
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "text": b"hello"}[how])
    with pytest.raises(FileFormatError, match=r"checkpoint\.pt: .*without --resume"):
        load_checkpoint(path, facts={})


def test_a_checkpoint_of_a_later_version_or_another_model_is_refused(saved):
    path, _, optimizer = saved
    found = load_checkpoint(path, facts={})
    half = {name: x.half() for name, x in found["model"].items()}
    before = [x.clone() for x in saved[1].parameters()]
    with pytest.raises(FileFormatError, match=r"does not fit the model .*float16"):
        restore(path, found | {"model": half}, saved[1], optimizer)
    assert all(map(torch.equal, before, saved[1].parameters()))
    with pytest.raises(FileFormatError, match="does not fit the model"):
        restore(path, found, torch.nn.Linear(4, 2), optimizer)
    torch.save(found | {"format": 2}, path)
    with pytest.raises(UnsupportedError, match="format 2"):
        load_checkpoint(path, facts={})


# States of users


class Extra(torch.nn.Linear):
    """A layer with more in its state than parameters."""

    extra: object = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def with_extra(extra):
    module = Extra(2, 1)
    module.extra = extra
    return module, torch.optim.Adam(module.parameters())


SAVED = [
    *(b"a\xff", {1, "b"}, 1 + 2j, (1, None), [True, 0.5], {"a": {1: 2}}, torch.Size([1])),
    *(torch.float32, torch.tensor([1 + 2j]).conj(), torch.ones(2, 3).T, torch.ones(1).expand(9)),
]


@pytest.mark.parametrize("extra", SAVED, ids=lambda extra: type(extra).__name__)
def test_what_is_saved_is_loaded(tmp_path, extra):
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "c.pt", *with_extra(extra), epoch=1, facts={})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    state = load_checkpoint(tmp_path / "c.pt", facts={})["model"]["_extra_state"]
    assert torch.equal(state, extra) if isinstance(extra, torch.Tensor) else state == extra


REFUSED = [b"", {(1,)}, {None: 1}, {(1, 2): 3}, torch.eye(2).to_sparse(), np.ones(1), Path(), "a"]


@pytest.mark.parametrize("extra", REFUSED, ids=str)
def test_what_is_not_loaded_is_not_saved(saved, extra):
    path, facts = saved[0], {"graph": None} if extra == "a" else {}
    before = path.read_bytes()
    with pytest.raises(FileFormatError, match=r"its state cannot be saved \(.*: keep numbers"):
        save_checkpoint(path, *with_extra(extra), epoch=1, facts=facts)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_memory_that_is_missing_is_no_damage(saved, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: torch.empty(1 << 60, dtype=torch.uint8))
    with pytest.raises(OutOfMemoryError, match=r"checkpoint\.pt: .*tried to allocate"):
        load_checkpoint(saved[0], facts={})


OPTIMIZERS: dict[str, dict[str, object]] = {
    "SGD": {"lr": 0.1, "fused": True, "momentum": 0.5},
    "Adam": {"amsgrad": True},
    **{name: {} for name in ("Adafactor", "Adamax", "AdamW", "ASGD", "NAdam", "Rprop")},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_every_optimizer_are_restored(tmp_path, name):
    path, states = tmp_path / "c.pt", []
    for _ in range(2):
        module = torch.nn.Linear(3, 2)
        optimizer = getattr(torch.optim, name)(module.parameters(), **OPTIMIZERS[name])
        if not states:
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            save_checkpoint(path, module, optimizer, epoch=1, facts={})
        else:
            restore(path, load_checkpoint(path, facts={}), module, optimizer)
        states.append(str(optimizer.state_dict()))
    assert states[0] == states[1]
