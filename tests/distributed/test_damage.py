"""Bits that flip in files of this package, and files made to harm, are refused in time."""

import io
import json
import os
import sys
import time
import tracemalloc
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import sparsefmt
from sparsefmt import CSR
from sparsefmt.distributed.job.checkpoint import (
    load_checkpoint,
    restore,
    save_checkpoint,
)
from sparsefmt.distributed.job.launch import place_of
from sparsefmt.distributed.parts import files
from sparsefmt.distributed.parts.cutting import write_partition
from sparsefmt.distributed.parts.files import read_part, read_partition
from sparsefmt.errors import FileFormatError, ShapeError, SparseFmtError
from sparsefmt.io import checksums
from sparsefmt.reorder import Order

FLIPS = 200
#: Most of them for a file; Python runs three times as long under a tracer.
SECONDS = 2 if sys.gettrace() is None else 6


def npz(folder):
    A = CSR([0, 2, 3], [0, 2, 1], np.array([1.0, -2.0, 0.5]), shape=(2, 3))
    sparsefmt.write(folder / "a.npz", A)
    return lambda: {
        name: array.tobytes() for name, array in sparsefmt.read(folder / "a.npz")._arrays().items()
    }


def partition(folder):
    ends, n = np.arange(6), 6
    write_partition(
        [(ends, ends[::-1], ends + 0.5)],
        folder / "parts",
        2,
        partitioner=lambda graph, parts: (Order(ends[::-1].copy()), (0, 3, n)),
        features=np.ones((n, 2)),
        labels=ends % 2,
        masks={"train": ends < 3},
    )

    def read():
        facts = read_partition(folder / "parts")
        parts = [read_part(facts, rank) for rank in range(2)]
        return str([asdict(facts), facts.order(), [vars(part) for part in parts]])

    return read


def model():
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return module, optimizer


def checkpoint(folder):
    save_checkpoint(folder / "c.pt", *model(), epoch=7, facts={"graph": "a", "seed": 1})
    return lambda: str(load_checkpoint(folder / "c.pt", facts={"graph": "a", "seed": 1}))


@pytest.fixture
def path(tmp_path):
    checkpoint(tmp_path)
    return tmp_path / "c.pt"


@pytest.mark.parametrize("kind", [npz, partition, checkpoint])
def test_a_bit_that_flips_is_refused_or_has_no_effect(tmp_path, kind):
    read = kind(tmp_path)
    good, refused = read(), []
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    ends = np.cumsum([path.stat().st_size * 8 for path in paths])
    for bit in np.random.default_rng(0).choice(ends[-1], FLIPS, replace=False):
        number = int(np.searchsorted(ends, bit, side="right"))
        path, place = paths[number], int(bit - (ends[number - 1] if number else 0))
        raw = path.read_bytes()
        damaged = bytearray(raw)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert read() == good, (path, place)
        except SparseFmtError as error:
            refused.append(str(path) in str(error))
        path.write_bytes(raw)
    assert read() == good
    assert all(refused)
    assert len(refused) > FLIPS / 4


# Partitions made to harm, whose checksums are right


def npy(array, **changed):
    """The bytes of a ``.npy``, other words in its header in the place of these."""
    stream = io.BytesIO()
    np.save(stream, array)
    raw = stream.getvalue()
    for old, new in changed.get("words", ()):
        raw = raw[:64].replace(old, new) + raw[64:128].replace(b" " * (len(new) - len(old)), b"", 1)
        raw += npy(array)[128:]
    return raw


THREE = np.arange(3, dtype=np.int32)
PARTS = {
    "zip": b"PK\x03\x04" + bytes(136),
    "negative": npy(THREE, words=[(b"(3,)", b"(-3,)")]),
    "beyond int64": npy(THREE, words=[(b"(3,)", b"(-" + b"9" * 25 + b",)")]),
    "header": npy(THREE, words=[(b"'descr'", b"[[[[[[[")]),
    "short": npy(THREE[:2]),
    "cut": npy(THREE)[:-1],
    "empty": b"",
    "objects": npy(THREE, words=[(b"<i4", b"|O")]),
    "long header": npy(THREE, words=[(b"NUMPY\1\0", b"NUMPY\2\0")]),  # 600 MB of it
    "other dtype": npy(THREE.astype(np.int64)),
    "labels": npy(THREE.astype(np.int64)),  # of two classes
    "fewer labels": npy(np.zeros(2, np.int64)),
    "labels in columns": npy(np.zeros((3, 1), np.int64)),
}


@pytest.mark.parametrize("name", PARTS)
def test_arrays_of_parts_made_to_harm_are_refused(tmp_path, name):
    read, raw = partition(tmp_path), PARTS[name]
    array = "labels" if "labels" in name else "source"
    (tmp_path / f"parts/part0/{array}.npy").write_bytes(raw)
    header = tmp_path / "parts/partition.json"
    said = json.loads(header.read_text())
    difference = len(raw) - said["files"][f"part0/{array}.npy"][0]
    said["files"][f"part0/{array}.npy"] = [len(raw), zlib.crc32(raw)]
    said["files"][f"part1/{array}.npy"][0] -= difference  # so that edges are as many in all
    said["checksum"] = checksums.checksum(said)
    header.write_text(json.dumps(said))
    tracemalloc.start()
    with pytest.raises(FileFormatError, match=r"part0.*: copy the folder again"):
        read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 2**20


def test_a_file_that_is_replaced_while_it_is_read_changes_nothing(tmp_path, monkeypatch):
    read = partition(tmp_path)
    good, mapped = read(), files.mapped

    def replacing(file, mend):
        (tmp_path / "new").write_bytes(bytes(os.fstat(file.fileno()).st_size))
        (tmp_path / "new").replace(file.name)
        return mapped(file, mend)

    monkeypatch.setattr(files, "mapped", replacing)
    assert read() == good
    with pytest.raises(FileFormatError, match="it is not the file that"):
        read()


def test_facts_of_a_partition_may_stand_in_another_order(tmp_path):
    partition(tmp_path)
    header = tmp_path / "parts/partition.json"
    said, fingerprint = json.loads(header.read_text()), read_partition(header.parent).fingerprint
    early = {**said, "checksum": checksums.checksum(said, sort_keys=False)}
    for text in (json.dumps(said, sort_keys=True), json.dumps(early)):
        header.write_text(text)
        assert read_partition(header.parent).fingerprint == fingerprint


def test_ranks_and_parts_have_a_limit(tmp_path):
    ranks = {"RANK": "0", "WORLD_SIZE": "100000000", "MASTER_PORT": "29500"}
    with pytest.raises(ShapeError, match=r"WORLD_SIZE is 100000000 but 8192 are the most: take"):
        place_of(ranks)
    with pytest.raises(ShapeError, match=r"parts is 8193 but 8192 are the most: take fewer"):
        write_partition([(THREE, THREE)], tmp_path / "parts", 8193)


# Checkpoints made to harm


def rewritten(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Write another pickle into a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, raw in members.items():
            archive.writestr(name, content if name.endswith("data.pkl") and content else raw)


def colliding(count: int) -> bytes:
    """A pickle of a dictionary, all of whose keys have the hash 0."""
    keys = [(key * (2**61 - 1)).to_bytes(10, "little") for key in range(1, count)]
    return b"\x80\x02}(" + b"".join(b"\x8a\x0a%sN" % key for key in keys) + b"u."


def stated(fact: bytes) -> bytes:
    """A pickle of a state, one of whose facts is this; its checksum is wrong."""
    names = b"".join(b"X\x05\0\0\0" + name for name in (b"epochK\0", b"model}", b"facts}"))
    head = b"\x80\x02}(X\x06\0\0\0formatK\x01X\x09\0\0\0optimizer}X\x08\0\0\0checksumK\0"
    return head + names + b"X\x05\0\0\0graph" + fact + b"su."


LISTS = b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(28))  # each the last one, twice
LONG = b"X\0\0\x01\0" + b"a" * 65536
MORE = "more than 262144 numbers, texts and lists"
PICKLES = {
    "deep": (b"\x80\x02}K\x01" + b"\x85" * 120_000 + b"K\x01s.", "a tuple as a key"),
    "deep in a call": (
        b"\x80\x02ccollections\nOrderedDict\n]K\x01" + b"\x85" * 120_000 + b"N\x86a\x85R.",
        "a mapping with items",
    ),
    "a set": (b"\x80\x02c__builtin__\nset\n]N\x85a\x85R.", "a tuple as a key"),
    "a codec": (
        b"\x80\x02c_codecs\nencode\nX\1\0\0\0aX\4\0\0\0idna\x86R.",
        "encoded otherwise",
    ),
    "lists": (b"\x80\x02" + b"]" * 999_999 + b".", "more than 131072 lists"),
    "large": (b"\x80\x02" + b"N0" * 999_999 + b"N.", "of more than 1048576 bytes"),
    "colliding": (colliding(55_000), "a int as a key"),
    "bytes": (
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x01\x85R.",
        "asks for builtins.byte",
    ),
    "a call of a storage": (
        stated(b"ctorch.storage\nUntypedStorage\n\x8a\x05\0\0\0\x40\0\x85R"),
        "a call of type",
    ),
    "a long name": (stated(b"ctorch\n" + b"a" * 100_000 + b"\n"), "a name of 100005 letters"),
    "shared lists": (stated(b"(]q\0" + LISTS + b"t"), MORE),
    "shared texts": (stated(b"](" + LONG + b"q\0" + b"h\0" * 100_000 + b"e"), MORE),
    "shared keys": (stated(b"](" + LONG + b"q\0" + b"}h\0Ns" * 99_999 + b"e"), MORE),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_of_checkpoints_made_to_harm_are_refused(path, name):
    raw, message = PICKLES[name]
    rewritten(path, raw)
    start = time.process_time()
    with pytest.raises(FileFormatError, match=rf"c\.pt: it is (no che|dam).*{message}"):
        load_checkpoint(path, facts={})
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("shared", [torch.ones(1).expand(2**28), torch.ones(9).untyped_storage()])
def test_tensors_that_share_memory_and_storages_are_no_part_of_a_checkpoint(path, shared):
    torch.save(torch.load(path, weights_only=True) | {"model": {"weight": shared}}, path)
    with pytest.raises(FileFormatError, match=r"c\.pt: it is damaged \(a (tensor|TypedS)"):
        load_checkpoint(path, facts={})


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_a_checkpoint_do_not_share_bytes(tmp_path):
    path = tmp_path / "c.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("c/data.pkl", stated(b"N"))
        archive.writestr("c/data/0", bytes(10**6))
        archive.filelist += archive.infolist()[1:] * 10_000
    start = time.process_time()
    with pytest.raises(FileFormatError, match=r"it is no checkpoint \(damaged\)"):
        load_checkpoint(path, facts={})
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("size", [-1, -90, 2000, 1000, 100, 10, 4, 1, 0])
def test_a_checkpoint_that_is_cut_is_refused(path, size):
    os.truncate(path, size % path.stat().st_size if size < 0 else size)
    with pytest.raises(FileFormatError, match=r"c\.pt: it is no checkpoint \(.*without --resume"):
        load_checkpoint(path, facts={})


def test_packed_checkpoints_and_other_bytes_before_one_are_refused(path):
    raw = path.read_bytes()
    rewritten(path, b"", zipfile.ZIP_DEFLATED)
    with pytest.raises(FileFormatError, match=r"it is no checkpoint \(packed\)"):
        load_checkpoint(path, facts={})
    path.write_bytes(b"\x80\x02}." + raw)
    with pytest.raises(FileFormatError, match=r"it is no checkpoint \(damaged\)"):
        load_checkpoint(path, facts={})


def shared(depth: int) -> list[object]:
    """A list of 2**depth items, that stands ``depth`` times in a file."""
    return [shared(depth - 1)] * 2 if depth else []


@pytest.mark.parametrize("name", ["facts", "model", "checksum", "expanded", "views"])
def test_states_that_grow_beyond_their_file_are_refused_in_time(path, name):
    state = torch.load(path, weights_only=True)
    if name == "expanded":
        state["model"]["weight"] = torch.zeros(1).expand(10**9)
    elif name == "views":
        x = torch.ones(10**6)
        state["model"].update((f"{i}", x[i:]) for i in range(100))
    else:
        state[name] = {"graph": shared(24)} if name == "facts" else shared(24)
    torch.save(state, path)
    start = time.process_time()
    with pytest.raises(FileFormatError, match=r"c\.pt: it is damaged|it lacks a part") as caught:
        load_checkpoint(path, facts={"graph": "a"})
    assert time.process_time() - start < SECONDS
    assert len(str(caught.value)) < 400


def test_a_checkpoint_has_one_pickle_and_no_more_members_than_a_model_needs(path):
    start = time.process_time()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("c/other.PKL", b"N.")
    with pytest.raises(FileFormatError, match=r"it is no checkpoint \(2 pickles"):
        load_checkpoint(path, facts={})
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(12_000):
            archive.writestr(f"{number}", b"")
    with pytest.raises(FileFormatError, match=r"12\d+ members of 12\d+, at most 12000 are read"):
        load_checkpoint(path, facts={})
    assert time.process_time() - start < SECONDS


STATES = {
    "moment": lambda state: state["state"][0].update(exp_avg=torch.ones(3)),
    "wide moment": lambda state: state["state"][0].update(exp_avg_sq=torch.ones(4, 1, 2)),
    "no moment": lambda state: state["state"][0].pop("exp_avg_sq"),
    "steps": lambda state: state["state"][0].update(step=torch.ones(2)),
    "no count": lambda state: state["state"][0].update(step="a"),
    "before the first": lambda state: state["state"][0].update(step=torch.tensor(-1.0)),
    "no state": lambda state: state["state"].update({0: 7}),
    "amsgrad": lambda state: state["param_groups"][0].update(amsgrad=True),
    "maximize": lambda state: state["param_groups"][0].update(maximize=True),
    "no betas": lambda state: state["param_groups"][0].pop("betas"),
    "no weight decay": lambda state: state["param_groups"][0].pop("weight_decay"),
    "a rate in words": lambda state: state["param_groups"][0].update(lr="fast"),
    "one beta": lambda state: state["param_groups"][0].update(betas=(0.9,)),
    "no groups": lambda state: state.update(param_groups=[]),
    "groups": lambda state: state.update(param_groups=7),
    "nothing": lambda state: state.clear(),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_an_optimizer_made_to_harm_are_refused_before_a_step(path, name):
    state = load_checkpoint(path, facts={})
    del state["checksum"]
    STATES[name](state["optimizer"])
    torch.save(state, path)
    with pytest.raises(FileFormatError, match=r"c\.pt: it does not fit the model \("):
        restore(path, load_checkpoint(path, facts={}), *model())


def test_states_that_share_memory_are_trained_apart(path):
    weights = []
    for shared in (False, True):
        state = load_checkpoint(path, facts={})
        moment = torch.full((1, 1), 0.5).expand(1, 2)
        for name in ("exp_avg", "exp_avg_sq"):
            state["optimizer"]["state"][0][name] = moment if shared else moment.clone()
        del state["checksum"]
        torch.save(state, path.with_name("other.pt"))
        module, optimizer = model()
        restore(path, load_checkpoint(path.with_name("other.pt"), facts={}), module, optimizer)
        optimizer.step()
        weights.append(module.weight)
    assert torch.equal(*weights)


def test_a_checkpoint_states_an_epoch_from_0_and_a_checksum_that_is_right(path):
    state = torch.load(path, weights_only=True)
    state["model"]["weight"][0, 0] += 1
    torch.save(state, path)
    with pytest.raises(FileFormatError, match=r"its checksum is \d+ but it says \d+: it is dam"):
        load_checkpoint(path, facts={})
    del state["checksum"]  # as an earlier release wrote it
    torch.save(state, path)
    module, optimizer = model()
    assert restore(path, load_checkpoint(path, facts={}), module, optimizer) == 7
    assert torch.equal(module.weight, state["model"]["weight"])
    torch.save(state | {"epoch": 0}, path)
    assert load_checkpoint(path, facts={})["epoch"] == 0
    torch.save(state | {"epoch": -1}, path)
    with pytest.raises(FileFormatError, match=r"its epoch is -1 but none is below 0"):
        load_checkpoint(path, facts={})
