"""Processes that train: a rank that is killed, hangs or fails is named, and fewer go on."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_cases import COMMAND, write_parts

from sparsefmt.distributed import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_parts(tmp_path_factory.mktemp("train") / "parts", 4)


def environment(**changed):
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | changed


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def start(arguments, folder, **changed):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(**changed),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def by_hand(ranks, arguments, folder):
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    return [start(arguments, folder, RANK=str(rank), **where) for rank in range(ranks)]


def read_losses(text):
    return {int(n): float(loss) for n, loss in re.findall(r"^epoch (\d+)  loss (\S+)", text, re.M)}


def wait_for(process, line):
    """Read its lines up to the one that begins so."""
    said = ""
    for one in iter(process.stdout.readline, ""):
        said += one
        if one.startswith(line):
            return said
    raise AssertionError(said + process.stderr.read())


def said_by_first(processes):
    """What the first of processes says that all train to their end."""
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        end(processes)
    assert not any(process.returncode for process in processes), said
    return said[0][0]


def end(processes):
    for one in processes:
        one.kill()
        one.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dead"), [(3, 1), (2, 0)])
def test_a_killed_rank_is_named_and_fewer_ranks_go_on(folder, tmp_path, capsys, ranks, dead):
    long = [*COMMAND, str(folder), "--checkpoint", "c.pt", "--timeout", "30", "--epochs", "100000"]
    processes = by_hand(ranks, long, tmp_path)
    try:
        begun = read_losses(wait_for(processes[0], "epoch 3"))
        processes[dead].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for rank, process in enumerate(processes):
            out, said = process.communicate(timeout=60)
            begun |= read_losses(out) if rank == 0 else {}
            if rank != dead:
                assert process.returncode == 1
                assert f"sparsefmt: error: rank {dead} is gone: " in said
                assert "--resume" in said
        assert time.monotonic() - killed < 30
    finally:
        end(processes)
    done = torch.load(tmp_path / "c.pt", weights_only=True)["epoch"]
    assert done >= 2
    rest = [*COMMAND[2:], str(folder), "--epochs", str(done + 2)]
    resumed = [*COMMAND[:2], *rest, "--checkpoint", "c.pt", "--resume"]
    found = read_losses(said_by_first(by_hand(ranks - 1, resumed, tmp_path)))
    assert sorted(found) == [done + 1, done + 2]
    assert [one.name for one in tmp_path.iterdir()] == ["c.pt"]  # a killed rank's draft is gone
    assert train.main(rest) == 0
    alone = read_losses(capsys.readouterr().out)
    assert all(loss == pytest.approx(alone[epoch], abs=2e-9) for epoch, loss in found.items())
    assert all(begun[epoch] == pytest.approx(alone[epoch], abs=2e-9) for epoch in (1, 2, 3))


HANGING = """
import sys, time
from sparsefmt.distributed import train
from sparsefmt.distributed.job import training

training.save_checkpoint = lambda *args, epoch, **facts: epoch == 3 and time.sleep(600)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_checkpoint_is_named(folder, tmp_path):
    """As on a disk that does not answer: the beat goes on, and the other rank waits."""
    command = ["-c", HANGING, *COMMAND[2:], str(folder), "--checkpoint", "c.pt", "--timeout", "5"]
    processes = by_hand(2, command, tmp_path)
    try:
        for process in processes:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 1
            assert "sparsefmt: error: rank 0 stands still: no progress for " in said
    finally:
        end(processes)


@pytest.mark.slow
def test_torchrun_trains_and_names_a_killed_rank(folder, tmp_path):
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    said = [str(free_port()), *COMMAND, str(folder), "--epochs", "100000"]
    process = start([*run, *said], tmp_path)
    try:
        wait_for(process, "epoch 2")
        os.kill(child_of(process.pid, "LOCAL_RANK=1"), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    finally:
        end([process])
    assert process.returncode != 0
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)", said)
    assert "Signal 9" in said


def child_of(parent, variable):
    """The process that a process has started with this variable."""
    for one in Path("/proc").glob("[0-9]*"):
        try:
            stat = (one / "stat").read_text().rpartition(")")[2].split()
            mine = int(stat[1]) == parent
            if mine and variable.encode() in (one / "environ").read_bytes().split(b"\0"):
                return int(one.name)
        except OSError:  # it has ended meanwhile
            continue
    raise AssertionError(variable)


@pytest.mark.slow
def test_a_rank_that_fails_tells_the_others_why(folder, tmp_path):
    (tmp_path / "c.pt").write_bytes(b"no checkpoint")
    processes = by_hand(
        2, [*COMMAND, str(folder), "--checkpoint", "c.pt", "--resume", "--timeout", "30"], tmp_path
    )
    try:
        for process in processes:
            _, said = process.communicate(timeout=60)
            assert process.returncode == 1
            last = said.splitlines()[-1]
            assert last.startswith("sparsefmt: error: rank 0 failed: FileFormatError: c.pt: it is")
    finally:
        end(processes)
