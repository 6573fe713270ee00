"""Checkpoints of a training: written whole or not at all, and good for any number of ranks."""

import os
import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ...errors import UnsupportedError
from ...io.bounded import check_regular, fault, named, writing
from ..parts.cutting import version

FORMAT = 1
_MEND = "give the checkpoint of this training, or train without --resume"
#: What torch.load raises on bytes that are no checkpoint, or that would run code.
_BROKEN = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    AttributeError,
    EOFError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


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
    Nothing in it depends on the number of ranks.  There is no state of a random generator:
    ``train`` seeds it at each epoch with seed, epoch and rank.
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
    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
    except _BROKEN as error:
        why = "damaged" if isinstance(error, KeyError) else str(error).split("\n")[0][:80]
        raise fault(source, f"it is no checkpoint ({why}): {_MEND}.") from error
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise fault(source, f"it is no checkpoint of sparsefmt: {_MEND}.")
    if state["format"] > FORMAT:
        raise UnsupportedError(
            f"{source}: format {state['format']}, and this sparsefmt knows {FORMAT}: update it."
        )
    kinds = {"epoch": int, "facts": dict, "model": dict, "optimizer": dict}
    if any(not isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise fault(source, f"it lacks a part: {_MEND}.")
    for name, value in facts.items():
        if state["facts"].get(name) != value:
            there = state["facts"].get(name)
            raise fault(source, f"its {name} is {there} and this training's is {value}: {_MEND}.")
    return state


def restore(
    path: str | os.PathLike[str], state: dict[str, Any], module: Module, optimizer: Optimizer
) -> int:
    """Copy the states of a checkpoint to model and optimizer; return the epochs that are done."""
    try:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except _BROKEN as error:
        why = " ".join(str(error).split())[:200]
        raise fault(Path(path), f"it does not fit the model ({why}): {_MEND}.") from error
    return int(state["epoch"])
