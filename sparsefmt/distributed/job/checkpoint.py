"""Checkpoints of a training: written whole or not at all, and good for any number of ranks."""

import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Adam, Optimizer

from ...errors import UnsupportedError
from ...formats.arrays import allocating
from ...io import checksums, pickles
from ...io.bounded import check_regular, decoding, fault, named, naming, unzipped, writing
from ..parts.cutting import version

FORMAT = 1
_MOST_MEMBERS, _MOST_PICKLED = 12_000, 1 << 20  # of the archive; bytes of its pickle
_MOST_CONTAINERS = 1 << 17  # that its pickle makes by one byte
_MOST_FACTS = 1 << 18  # numbers, lists and texts of 64 letters in a state
_SPARE = 1 << 26  # bytes of tensors beyond those of the memory in which they lie
_SIMPLE = "keep numbers, texts, tensors, and lists and dictionaries of them in it"
_MEND = "give the checkpoint of this training, or train without --resume"
#: The names that the pickle of a checkpoint has.
_KNOWN = {
    "mapping": r"collections\.OrderedDict",
    "tensor": r"torch\._utils\._rebuild_(tensor_v2|parameter)",
    "encode": r"_codecs\.encode",
    "set": r"(builtins|__builtin__)\.set",
    "complex": r"(builtins|__builtin__)\.complex",
    "type": r"torch\.(\w+Storage|storage\.UntypedStorage|\w*(float|int|bool)\w*)",
    "value": r"torch\.(Size|device)",
}
#: Options of an optimizer that may be other numbers: ``train`` sets them.
_FREE = ("lr", "weight_decay")


def save_checkpoint(
    path: str | os.PathLike[str],
    module: Module,
    optimizer: Optimizer,
    *,
    epoch: int,
    facts: Mapping[str, Any],
) -> None:
    """Write parameters, optimizer and the epoch of a training; one rank does it for all.

    The file changes only once the new one is complete and on the disk.

    Parameters
    ----------
    path : path
    module : Module
        Its parameters are the same on all ranks.
    optimizer : Optimizer
    epoch : int
        Epochs that are done.
    facts : mapping of str to str or int
        What must be the same when the training goes on: the fingerprint of the graph, the seed,
        options of the model.

    Raises
    ------
    FileFormatError, UnsupportedError
        If no file can have this name, or it is a device, pipe or socket, or if ``load_checkpoint``
        would refuse the state.
    OSError
        As the operating system reports it.

    Notes
    -----
    It has a checksum over all, which ``load_checkpoint`` compares; files of earlier releases have
    none and are read.  Nothing in it depends on the number of ranks.  There is no state of a random
    generator: ``train`` seeds it at each epoch with seed, epoch and rank.
    """
    target = named(path)
    check_regular(target)
    state = {
        "format": FORMAT,
        "sparsefmt": version(),
        "epoch": epoch,
        "facts": dict(facts),
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    why = "its state cannot be saved"
    with decoding(target, why, _SIMPLE):
        _check_facts(facts)
        state[checksums.NAME] = checksums.checksum(_facts(state))
    with writing(target) as stream:
        _save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
        with decoding(target, why, _SIMPLE), Path(stream.name).open("rb") as draft:
            _check_archive(draft, is_whole=True)
    if hasattr(os, "O_DIRECTORY"):  # the new name reaches the disk too; not on Windows
        folder = os.open(target.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _save(state: dict[str, Any], stream: BinaryIO) -> None:
    """Write a state with the CRC-32 of each member, whatever torch is set to."""
    is_set = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(state, stream)
    finally:
        torch.serialization.set_crc32_options(is_set)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise for a path that ``save_checkpoint`` could not write to, before anything is computed."""
    target = named(path)
    check_regular(target)
    if target.is_dir():
        raise fault(target, "it is a folder: give the name of a file for the checkpoint.")
    parent = target.resolve().parent
    if not parent.is_dir():
        raise fault(parent, "no such folder for a checkpoint: make it, or give another one.")
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        why = f"no checkpoint can be written there ({error.strerror}): give another folder."
        raise fault(parent, why) from error


def load_checkpoint(path: str | os.PathLike[str], *, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Read a checkpoint, and raise for one of another training.

    Parameters
    ----------
    path : path
        Written by ``save_checkpoint``.
    facts : mapping of str to str or int
        What ``save_checkpoint`` must have been given.

    Returns
    -------
    dict
        ``"epoch"``, and the states ``"model"`` and ``"optimizer"``, on the CPU.

    Raises
    ------
    FileFormatError
        If the file is none, or damaged, or of another graph, model or seed.
    UnsupportedError
        If a later version of this package wrote it, or it is a device, pipe or socket.
    FileNotFoundError, OSError
        As the operating system reports them.
    OutOfMemoryError
        If memory runs out.
    """
    source = named(path)
    check_regular(source)
    damage = decoding(source, "it is no checkpoint", _MEND)
    with naming(source), allocating(f"{source}"), damage, source.open("rb") as file:
        _check_archive(file, is_whole=False)
        state = _load(file)
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise fault(source, f"it is no checkpoint of sparsefmt: {_MEND}.")
    if state["format"] > FORMAT:
        raise UnsupportedError(
            f"{source}: format {state['format']}, and this sparsefmt knows {FORMAT}: update it."
        )
    kinds = {"epoch": int, "facts": dict, "model": dict, "optimizer": dict}
    if any(not isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise fault(source, f"it lacks a part: {_MEND}.")
    if state["epoch"] < 0 or state["epoch"] is True:
        raise fault(source, f"its epoch is {state['epoch']} but none is below 0: {_MEND}.")
    with decoding(source, "it is damaged", _MEND):
        checksums.verify(source, _facts(state), _MEND)
        _check_facts(state["facts"])
        for name, value in facts.items():
            actual = state["facts"].get(name)
            if actual != value:
                why = f"its {name} is {str(actual)[:80]} and this training's is {value}"
                raise fault(source, f"{why}: {_MEND}.")
    return state


def _load(file: BinaryIO) -> Any:
    """Read a file of torch; raise ``MemoryError`` where torch has none."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except RuntimeError as error:
        if "tried to allocate" in str(error):
            raise MemoryError(str(error).split("\n")[0]) from error
        raise


def _check_archive(file: BinaryIO, *, is_whole: bool) -> None:
    """Raise for what torch would trust: packed members, names, keys that hang, damaged bytes."""
    with unzipped(file, _MOST_MEMBERS) as archive:
        infos = archive.infolist()
        pickled = [info for info in infos if info.filename.lower().endswith(".pkl")]
        if any(info.compress_type for info in infos):
            raise ValueError("packed")
        shared = sum(info.file_size for info in infos) > file.seek(0, os.SEEK_END)
        file.seek(0)
        if shared or file.read(4) != b"PK\3\4" or not (is_whole or archive.testzip() is None):
            raise ValueError("damaged")
        if len(pickled) != 1 or pickled[0].file_size > _MOST_PICKLED:
            raise ValueError(f"{len(pickled)} pickles, or of more than {_MOST_PICKLED} bytes")
        raw = archive.read(pickled[0])
        if sum(map(raw.count, b"(])}\x85\x86\x87")) > _MOST_CONTAINERS:
            raise ValueError(f"more than {_MOST_CONTAINERS} lists, tuples and dictionaries")
        pickles.load(raw, _KNOWN, "checkpoint")
    file.seek(0)


def _check_facts(facts: Mapping[Any, object]) -> None:
    """Raise for facts that are no texts and integers by names."""
    for name, value in facts.items():
        if not isinstance(name, str) or not isinstance(value, str | int):
            raise TypeError(f"a {type(value).__name__} among facts of the training")


def _facts(state: Mapping[str, Any]) -> Any:
    """Return what JSON can write of a state: of a tensor dtype, shape and CRC-32.

    Raises for what is too large when it is written: a list may hold another one many times, and a
    tensor more numbers than its memory.
    """
    sums: dict[object, int] = {}
    memory: set[int] = set()
    left, spare = _MOST_FACTS, _SPARE

    def crc(x: Tensor) -> int:
        nonlocal spare
        storage = x.untyped_storage()
        place = storage.data_ptr()
        key = (place, x.storage_offset(), x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
        if key not in sums:
            spare += 2 * storage.nbytes() * (place not in memory) - x.numel() * x.itemsize
            memory.add(place)
            if spare < 0:
                raise ValueError(f"a tensor of shape {tuple(x.shape)} in {storage.nbytes()} bytes")
            sums[key] = _sum(x)
        return sums[key]

    def fact(thing: object) -> Any:
        nonlocal left
        left -= 1 + (len(thing) // 64 if isinstance(thing, str | bytes) else 0)
        if left < 0:
            raise ValueError(f"more than {_MOST_FACTS} numbers, texts and lists")
        if isinstance(thing, Tensor):
            return [str(thing.dtype), list(thing.shape), crc(thing)]
        if isinstance(thing, dict):
            if not all(isinstance(key, str | int) for key in thing):
                raise TypeError("a key that is no text or integer")
            return {str(fact(key)): fact(value) for key, value in thing.items()}
        if isinstance(thing, list | tuple):
            return [fact(value) for value in thing]
        if isinstance(thing, set):
            return sorted(map(repr, map(fact, thing)))
        if thing is None or isinstance(thing, str | int | float):
            return thing
        if isinstance(thing, bytes | complex | torch.dtype | torch.device):
            return str(thing)
        raise TypeError(f"a {type(thing).__name__}")

    return fact(state)


def _sum(x: Tensor) -> int:
    """Return the CRC-32 of a tensor's numbers in its order, as little-endian machines have them."""
    width = x.itemsize // (2 if x.is_complex() else 1)
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    words = x.view(torch.uint8).numpy().view(f"u{width}")
    return zlib.crc32(np.asarray(words, f"<u{width}").data)


def restore(
    path: str | os.PathLike[str], state: dict[str, Any], module: Module, optimizer: Optimizer
) -> int:
    """Copy the states of a checkpoint to model and optimizer; return the epochs that are done.

    Raises ``FileFormatError`` for a state that does not fit, or with which a step would fail.
    """
    with decoding(Path(path), "it does not fit the model", _MEND):
        groups = state["optimizer"]["param_groups"]
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for name in group.keys() - {"params"}:
                value = saved.get(name)
                is_free = name in _FREE and isinstance(value, float | int | Tensor)
                if not is_free and value != group[name]:
                    why = f"its {name} is {str(value)[:80]}, not {group[name]}"
                    raise ValueError(why)
            if isinstance(optimizer, Adam):
                for number, param in zip(saved["params"], group["params"], strict=True):
                    _check_moments(state["optimizer"]["state"].get(number), group, param)
        for name, x in module.state_dict().items():
            dtype = getattr(state["model"].get(name, x), "dtype", None)
            if isinstance(x, Tensor) and dtype != x.dtype:
                raise ValueError(f"{name} is {dtype}, not {x.dtype}")
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for values in optimizer.state.values():  # which in a checkpoint may share their memory
            values.update({name: x.clone() for name, x in values.items() if isinstance(x, Tensor)})
    return int(state["epoch"])


def _check_moments(state: Mapping[str, Any] | None, group: Mapping[str, Any], x: Tensor) -> None:
    """Raise for a state of a parameter with which a step of Adam would fail."""
    if state is None:
        return  # it had no gradient yet
    names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
    expected = {"step": torch.Size(), **dict.fromkeys(names, x.shape)}
    actual = {name: torch.as_tensor(value).shape for name, value in state.items()}
    if actual != expected or not state["step"] >= 0:
        raise ValueError(f"{actual} instead of {expected}, or fewer than 0 steps"[:200])
