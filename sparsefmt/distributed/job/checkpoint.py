"""Checkpoints of a training: written whole or not at all, and good for any number of ranks."""

import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.storage import TypedStorage, UntypedStorage

from ...errors import UnsupportedError
from ...io import checksums, pickles
from ...io.bounded import check_regular, decoding, fault, named, naming, writing
from ..parts.cutting import version

FORMAT = 1
_MEND = "give the checkpoint of this training, or train without --resume"
#: The names that the pickle of a checkpoint has.
_KNOWN = {
    "mapping": r"collections\.OrderedDict",
    "tensor": r"torch\._utils\._rebuild_(tensor_v2|parameter)",
    "type": r"torch\.(\w+Storage|storage\.UntypedStorage|\w*(float|int|bool)\w*)",
    "value": r"torch\.(Size|device)",
}
#: Options of an optimizer that may differ: ``train`` sets them, or what is theirs alone.
_FREE = ("params", "lr", "weight_decay")
#: Items and bytes of a checkpoint for each of its file, at most: tensors may share their memory.
_SHARED = 8


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
        If no file can have this name, or it is a device, pipe or socket.
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
    state[checksums.NAME] = checksums.checksum(state, _sum)
    with writing(target) as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    if hasattr(os, "O_DIRECTORY"):  # the new name reaches the disk too; not on Windows
        folder = os.open(target.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
    """
    source = named(path)
    check_regular(source)
    what = "it is no checkpoint"
    with naming(source), decoding(source, what, _MEND), source.open("rb") as file:
        _check_archive(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
        _check_sizes(state, source.stat().st_size)
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise fault(source, f"it is no checkpoint of sparsefmt: {_MEND}.")
    if state["format"] > FORMAT:
        raise UnsupportedError(
            f"{source}: format {state['format']}, and this sparsefmt knows {FORMAT}: update it."
        )
    kinds = {"epoch": int, "facts": dict, "model": dict, "optimizer": dict}
    if any(not isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise fault(source, f"it lacks a part: {_MEND}.")
    if state["epoch"] < 0:
        raise fault(source, f"its epoch is {state['epoch']} but none is below 0: {_MEND}.")
    with decoding(source, "it is damaged", _MEND):
        checksums.verify(source, state, _MEND, default=_sum)
        for name, value in facts.items():
            there = state["facts"].get(name)
            if there != value:
                why = f"its {name} is {there} and this training's is {value}"
                raise fault(source, f"{why}: {_MEND}.")
    return state


def _check_archive(file: BinaryIO) -> None:
    """Raise for what torch would trust: packed members, other bytes, names, and keys that hang."""
    with zipfile.ZipFile(file) as archive:
        packed = any(info.compress_type for info in archive.infolist())
        size = file.seek(0, os.SEEK_END)
        if sum(info.file_size for info in archive.infolist()) > size:  # members share bytes
            raise ValueError("damaged")
        file.seek(0)
        if packed or file.read(4) != b"PK\3\4" or archive.testzip():
            raise ValueError("packed" if packed else "damaged")
        for info in archive.infolist():
            if info.filename.lower().endswith(".pkl"):
                pickles.load(archive.read(info), _KNOWN, "checkpoint")
    file.seek(0)


def _check_sizes(state: object, size: int) -> None:
    """Raise for many more bytes than a file has, of parts that share them, and for storages."""
    left, things = size * _SHARED, [state]
    while things:
        thing = things.pop()
        left -= thing.nbytes if isinstance(thing, Tensor) else sys.getsizeof(thing)
        if left < 0 or isinstance(thing, UntypedStorage | TypedStorage):
            raise ValueError("it holds more than tensors and numbers of its size")
        if isinstance(thing, dict):
            things += [*thing, *thing.values()]
        elif isinstance(thing, list | tuple):
            things += thing


def _sum(thing: object) -> object:
    """Return dtype, shape and CRC-32 of a tensor, and the text of all else."""
    if not isinstance(thing, Tensor):
        return str(thing)
    data = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [str(thing.dtype), list(thing.shape), zlib.crc32(data.numpy().data)]


def restore(
    path: str | os.PathLike[str], state: dict[str, Any], module: Module, optimizer: Optimizer
) -> int:
    """Copy the states of a checkpoint to model and optimizer; return the epochs that are done.

    Raises ``FileFormatError`` for a state that does not fit, or with which a step would fail.
    """
    own = [dict(group) for group in optimizer.param_groups]
    with decoding(Path(path), "it does not fit the model", _MEND):
        _try_step(optimizer, state["optimizer"])
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        _copy_tensors(optimizer)
        for group, loaded in zip(own, optimizer.param_groups, strict=True):
            for name in group.keys() - _FREE:
                if loaded.get(name) != group[name]:
                    raise ValueError(f"its {name} is {loaded.get(name)}, not {group[name]}")
    return int(state["epoch"])


def _try_step(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Run a step from a state on tensors without memory."""
    groups = [
        {**group, "params": [torch.empty_like(p, device="meta") for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    kind: Any = type(optimizer)
    trial = kind(groups)
    trial.load_state_dict(state)
    _copy_tensors(trial)
    for group in groups:
        for param in group["params"]:
            param.grad = torch.empty_like(param)
    trial.step()


def _copy_tensors(optimizer: Optimizer) -> None:
    """Copy the tensors of an optimizer's state, which in a checkpoint may share their memory."""
    for values in optimizer.state.values():
        values.update({name: x.clone() for name, x in values.items() if isinstance(x, Tensor)})
