"""Training gives the same losses on any number of ranks, also where it goes on on other ones."""

import re
from importlib.util import find_spec

import numpy as np
import pytest
import train_cases
from train_cases import COMMAND, options_of, write_parts

from sparsefmt import errors
from sparsefmt.distributed import train
from sparsefmt.distributed.job import training
from sparsefmt.distributed.job.options import MODELS
from sparsefmt.distributed.job.training import check_trainable
from sparsefmt.distributed.parts.cutting import write_partition
from sparsefmt.distributed.parts.files import read_part, read_partition


def train_on(ranks, count, folder, **changed):
    """Losses that all ranks have alike."""
    first, *others = ranks.run(count, train_cases.losses, folder, changed)
    assert all(one == first for one in others)
    return np.array(first)


def test_a_graph_is_loaded_from_its_folder(ranks, folder):
    for count in (1, 2, 3, 4):
        for (source, target), bounds, rank in ranks.run(count, train_cases.loaded, folder):
            part = read_part(folder, rank, count)
            assert part.bounds == bounds
            assert sorted(zip(source, (t + bounds[rank] for t in target), strict=True)) == sorted(
                zip(*part.edge_index.tolist(), strict=True)
            )


def test_a_device_that_there_is_not_is_told_to_the_others(ranks, folder):
    (kind, text), own = ranks.run(2, train_cases.loaded_to_no_device, folder)
    assert own[0] == "RuntimeError"
    assert kind == "RankError"
    assert text.startswith("rank 1 cannot take part: RuntimeError: ")


@pytest.mark.parametrize("model", MODELS)
def test_losses_do_not_depend_on_ranks(ranks, folder, tmp_path, model):
    """Nor where four ranks begin and three go on."""
    alone = train_on(ranks, 1, folder, model=model)
    assert alone[-1] < alone[0]
    for count in (2, 3, 4):
        found = train_on(ranks, count, folder, model=model)
        assert np.abs(found - alone).max() < 1e-10
    given = {"model": model, "checkpoint": tmp_path / "checkpoint.pt"}
    begun = train_on(ranks, 4, folder, epochs=3, **given)
    rest = train_on(ranks, 3, folder, resume=True, **given)
    assert (len(begun), len(rest)) == (3, len(alone) - 3)
    assert np.abs(np.append(begun, rest) - alone).max() < 1e-10


def test_the_first_layer_of_gat_sends_features_once(ranks, folder):
    """Also with dropout: forward and backward of the second layer are all that is left."""
    given = {"model": "gat", "dropout": 0.5}
    for first, *others in ranks.run(2, train_cases.sent, folder, given):
        assert [exchanges for exchanges, _ in (first, *others)] == [3, 2, 2]
        assert others[0] == others[1]
        assert first[1] > others[0][1]


@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_edge_weights_count(ranks, tmp_path, model):
    weighted = write_parts(tmp_path / "weighted", 3, weighted=True)
    plain = write_parts(tmp_path / "plain", 3)
    alone = train_on(ranks, 1, weighted, model=model)
    assert np.abs(train_on(ranks, 3, weighted, model=model) - alone).max() < 1e-10
    assert np.abs(train_on(ranks, 1, plain, model=model) - alone).max() > 1e-6


@pytest.mark.parametrize("cut", ["balanced", "metis"])
def test_a_training_goes_on_on_other_ranks_and_parts(ranks, folder, tmp_path, cut):
    if cut == "metis" and not find_spec("pymetis"):
        pytest.skip("pymetis is not installed")
    whole = train_on(ranks, 3, folder)
    checkpoint = tmp_path / "checkpoint.pt"
    begun = train_on(ranks, 3, folder, epochs=3, checkpoint=checkpoint)
    other = write_parts(tmp_path / "parts", 5, by=cut)
    saved = checkpoint.read_bytes()
    for count in (1, 2, 4):
        checkpoint.write_bytes(saved)
        rest = train_on(ranks, count, other, checkpoint=checkpoint, resume=True)
        assert np.abs(np.append(begun, rest) - whole).max() < 1e-10


def test_a_training_with_dropout_goes_on_as_if_it_had_not_stopped(ranks, folder, tmp_path):
    given = {"dropout": 0.5, "checkpoint": tmp_path / "checkpoint.pt"}
    whole = train_on(ranks, 2, folder, dropout=0.5)
    begun = train_on(ranks, 2, folder, epochs=4, **given)
    rest = train_on(ranks, 2, folder, resume=True, **given)
    assert np.append(begun, rest).tolist() == whole.tolist()
    assert len(set(whole.tolist())) == len(whole)
    # Without a checkpoint resume begins.
    given = {"checkpoint": tmp_path / "none.pt", "resume": True, "epochs": 2}
    assert len(train_on(ranks, 2, folder, **given)) == 2
    assert len(train_on(ranks, 2, folder, **given)) == 0


def test_nothing_left_to_do_is_said(folder, tmp_path, capsys):
    arguments = [*COMMAND[2:], str(folder), "--checkpoint", str(tmp_path / "c.pt"), "--epochs", "2"]
    assert train.main(arguments) == 0
    capsys.readouterr()
    assert train.main([*arguments, "--resume"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "nothing is left to do: epoch 2 of 2 is done; give more --epochs"


def refused(arguments, capsys):
    """What a training says that fails."""
    assert train.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sparsefmt: error:")
    return line


def test_a_loss_that_is_not_finite_ends_the_training(folder, tmp_path, capsys, monkeypatch):
    """And the last checkpoint stays as it is."""
    checkpoint = tmp_path / "c.pt"
    arguments = [*COMMAND[2:], "--checkpoint", str(checkpoint)]
    assert train.main([*arguments, str(folder), "--epochs", "1"]) == 0
    saved = checkpoint.read_bytes()
    monkeypatch.setattr(training, "cross_entropy", lambda logits, *_: logits.sum() * np.inf)
    capsys.readouterr()
    said = refused([*arguments, str(folder), "--resume"], capsys)
    assert re.search(r"loss of epoch 2 is -?(inf|nan), nothing is saved: give a smaller --lr", said)
    assert checkpoint.read_bytes() == saved


def test_features_that_are_not_finite_are_named(tmp_path, capsys):
    ends, x = np.arange(10), np.ones((10, 2))
    x[3, 1] = np.nan
    write_partition([(ends, ends)], tmp_path / "parts", 2, features=x, labels=ends % 2)
    said = refused([*COMMAND[2:], str(tmp_path / "parts")], capsys)
    assert "the loss of epoch 1 is nan, nothing is saved: features hold values that" in said


def test_folders_that_lack_something_are_refused(folder, tmp_path):
    found = read_partition(folder)
    for name in ("features", "labels"):
        dtypes = {key: one for key, one in found.dtypes.items() if key != name}
        lacking = type(found)(**{**vars(found), "dtypes": dtypes})
        with pytest.raises(errors.UnsupportedError, match=f"no {name}: .*--data"):
            check_trainable(lacking, options_of())
    many = type(found)(**{**vars(found), "classes": 2 * 10**9})
    with pytest.raises(errors.UnsupportedError, match="labels up to 1999999999: number classes"):
        check_trainable(many, options_of())
    with pytest.raises(errors.UnsupportedError, match="no multiple of --heads"):
        check_trainable(found, options_of(model="gat", hidden=7))
    weighted = read_partition(write_parts(tmp_path / "weighted", 2, weighted=True))
    with pytest.raises(errors.UnsupportedError, match="gat does not read"):
        check_trainable(weighted, options_of(model="gat"))


# The command


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none"], "none: there is no partition.json"),
        (["parts", "--model", "gat", "--hidden", "9"], "no multiple of --heads"),
        (["parts", "--checkpoint", "parts/no/c.pt"], "parts/no: no such folder"),
        (["parts", "--checkpoint", "parts"], "parts: it is a folder: give the name of a file"),
        (["parts", "--checkpoint", ""], "it is a folder: give the name of a file"),
        (["parts", "--checkpoint", "/proc/c.pt"], "/proc: no checkpoint can be written there"),
    ],
)
def test_a_process_alone_refuses_in_one_line(folder, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(folder.parent)
    assert text in refused([*arguments, "--device", "cpu"], capsys)


BAD = ("--epochs 0", "--hidden 100000000000", "--seed 99999999999999999999", "--seed x", "--lr x")


@pytest.mark.parametrize("arguments", [*BAD, "--dropout 2", "--timeout 0", "--resume", "--bad"])
def test_bad_options_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as found:
        train.main(["parts", *arguments.split()])
    assert found.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err
