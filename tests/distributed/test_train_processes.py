"""Processes that train: a rank that is killed, hangs or fails is named, and fewer go on.

They are forked from one that has imported torch, but for torchrun's.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import forked, free_port
from train_cases import COMMAND

from sparsefmt.distributed import train
from sparsefmt.distributed.job import training

ROOT = Path(__file__).resolve().parents[2]


class Rank:
    """A process that trains in a folder as ``python -m sparsefmt.distributed.train`` does."""

    def __init__(self, arguments, folder, said, main, **where):
        self.said = Path(f"{said}.out"), Path(f"{said}.err")
        self.process = forked(run, arguments, folder, self.said, main, where)

    def read(self):
        """What it has said, by itself and of errors."""
        return [one.read_text() if one.exists() else "" for one in self.said]

    def wait_for(self, line):
        """Wait until a line begins so."""
        while not re.search(rf"^{line}", self.read()[0], re.M):
            assert self.process.is_alive(), self.read()
            time.sleep(0.05)

    def end(self, seconds):
        """Wait for its end: its exit status, and what it has said of errors."""
        self.process.join(seconds)
        return self.process.exitcode, self.read()[1]


def run(arguments, folder, said, main, where):
    """Train in this process, whose output goes to files."""
    torch.set_num_threads(1)
    os.environ.update(where)
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(folder)
    sys.exit(main(arguments))


@pytest.fixture
def started(tmp_path_factory):
    """Start ranks, and end those that are left."""
    processes = []

    def start(ranks, arguments, folder, main=train.main):
        where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
        where["MASTER_PORT"] = str(free_port())
        said = tmp_path_factory.mktemp("said")
        found = [
            Rank(arguments, folder, said / str(rank), main, RANK=str(rank), **where)
            for rank in range(ranks)
        ]
        processes.extend(found)
        return found

    yield start
    for one in processes:
        one.process.kill()
        one.process.join()


def read_losses(text):
    return {int(n): float(loss) for n, loss in re.findall(r"^epoch (\d+)  loss (\S+)", text, re.M)}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dead"), [(3, 1), (2, 0)])
def test_a_killed_rank_is_named_and_fewer_ranks_go_on(
    started, folder, tmp_path, capsys, ranks, dead
):
    given = [*COMMAND[2:], str(folder), "--checkpoint", "c.pt"]
    processes = started(ranks, [*given, "--timeout", "30", "--epochs", "100000"], tmp_path)
    processes[0].wait_for("epoch 3")
    os.kill(processes[dead].process.pid, signal.SIGKILL)
    killed = time.monotonic()
    for rank, process in enumerate(processes):
        status, said = process.end(60)
        if rank != dead:
            assert status == 1
            assert f"sparsefmt: error: rank {dead} is gone: " in said
            assert "--resume" in said
    assert time.monotonic() - killed < 30
    begun = read_losses(processes[0].read()[0])
    done = torch.load(tmp_path / "c.pt", weights_only=True)["epoch"]
    assert done >= 2
    epochs = "--epochs", str(done + 2)
    resumed = started(ranks - 1, [*given, *epochs, "--resume"], tmp_path)
    assert [one.end(120)[0] for one in resumed] == [0] * (ranks - 1)
    found = read_losses(resumed[0].read()[0])
    assert sorted(found) == [done + 1, done + 2]
    assert [one.name for one in tmp_path.iterdir()] == ["c.pt"]  # a killed rank's draft is gone
    assert train.main([*COMMAND[2:], str(folder), *epochs]) == 0
    alone = read_losses(capsys.readouterr().out)
    assert all(loss == pytest.approx(alone[epoch], abs=2e-9) for epoch, loss in found.items())
    assert all(begun[epoch] == pytest.approx(alone[epoch], abs=2e-9) for epoch in (1, 2, 3))


def hang(arguments):
    """Train where the checkpoint of the third epoch is never written."""
    training.save_checkpoint = lambda *args, epoch, **facts: epoch == 3 and time.sleep(600)
    return train.main(arguments)


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_checkpoint_is_named(started, folder, tmp_path):
    """As on a disk that does not answer: the beat goes on, and the other rank waits."""
    given = [*COMMAND[2:], str(folder), "--checkpoint", "c.pt", "--timeout", "5"]
    for process in started(2, given, tmp_path, hang):
        status, said = process.end(120)
        assert status == 1
        assert "sparsefmt: error: rank 0 stands still: no progress for " in said


def test_a_rank_that_fails_tells_the_others_why(started, folder, tmp_path):
    (tmp_path / "c.pt").write_bytes(b"no checkpoint")
    given = [*COMMAND[2:], str(folder), "--checkpoint", "c.pt", "--resume", "--timeout", "30"]
    for process in started(2, given, tmp_path):
        status, said = process.end(60)
        assert status == 1
        last = said.splitlines()[-1]
        assert last.startswith("sparsefmt: error: rank 0 failed: FileFormatError: c.pt: it is")


@pytest.mark.slow
def test_torchrun_trains_and_names_a_killed_rank(folder, tmp_path):
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *run, str(free_port()), *COMMAND, str(folder), "--epochs", "100000"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert any(line.startswith("epoch 2") for line in process.stdout), process.stderr.read()
        os.kill(child_of(process.pid, "LOCAL_RANK=1"), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
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
