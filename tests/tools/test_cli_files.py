"""What ``convert`` leaves behind when it is stopped, and what it says when the disk refuses."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsefmt.generate import power_law
from sparsefmt.io import bounded, read, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and limits of Linux")
ROOT = Path(__file__).resolve().parents[2]
#: Opens the output, says so, and waits in the middle of writing.
STOPS = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run in the background
signal.signal(signal.SIGINT, signal.default_int_handler)
from sparsefmt import cli
from sparsefmt.io import bounded, edge_list
pieces = bounded.writing
class Slow:
    def __init__(self, stream): self.stream = stream
    def write(self, block):
        self.stream.write(block); print("writing", flush=True); time.sleep(20)
from contextlib import contextmanager
@contextmanager
def writing(path):
    with pieces(path) as stream:
        yield Slow(stream)
edge_list.writing = writing
sys.exit(cli.main(sys.argv[1:]))
"""
ENDINGS = ["csv", "txt.gz", "csv.bz2"]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in.npz", power_law(400, 3000, community=50, seed=1))
    return tmp_path


def begin(folder, target):
    """A process that has opened its output and does not finish it."""
    command = [sys.executable, "-c", STOPS, "convert", "in.npz", target]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "writing\n"
    return process


def hidden(folder):
    return [one for one in folder.iterdir() if one.name.startswith(".")]


def end(process, how):
    process.send_signal(how)
    err = process.communicate(timeout=15)[1]
    return process.returncode, err.strip()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)]
)
def test_a_signal_leaves_nothing(folder, ending, how, code):
    process = begin(folder, f"out.{ending}")
    assert len(hidden(folder)) == 1
    assert end(process, how) == (code, "")
    assert [one.name for one in folder.iterdir()] == ["in.npz"]


def test_the_next_run_removes_what_a_killed_one_left(folder):
    dead, other = begin(folder, "out.csv"), begin(folder, "other.csv")
    end(dead, signal.SIGKILL), end(other, signal.SIGKILL)
    living = begin(folder, "out.csv")
    assert len(hidden(folder)) == 2  # of the other target, and of the living process
    write(folder / "out.csv", read(folder / "in.npz"))
    assert len(hidden(folder)) == 2
    end(living, signal.SIGKILL)
    write(folder / "out.csv", read(folder / "in.npz"))
    write(folder / "other.csv", read(folder / "in.npz"))
    assert hidden(folder) == []
    assert read(folder / "out.csv").nnz == 3000


def test_files_of_others_are_not_swept(folder):
    for name in (".out.csv.tmp", ".tmp", f".{'0' * 16}.{'0' * 16}.tmp"):
        (folder / name).write_text("mine")
    write(folder / "out.csv", read(folder / "in.npz"))
    assert len(hidden(folder)) == 3


def test_a_draft_that_is_swept_before_it_is_locked_is_made_again(folder, monkeypatch):
    import fcntl

    swept = []

    def flock(raw, how):
        if not swept:
            swept.append(Path(raw.name))
            swept[0].unlink()

    monkeypatch.setattr(bounded.fcntl, "flock", flock)
    write(folder / "out.csv", read(folder / "in.npz"))
    assert swept
    assert hidden(folder) == []
    assert fcntl.LOCK_EX


def test_the_longest_name_can_be_written(folder):
    path = folder / f"{'x' * 251}.csv"
    write(path, read(folder / "in.npz"))
    assert read(path).nnz == 3000


TARGETS = ["out.npz", "out.mtx", "out.csv", "out.mtx.gz", "out.txt.bz2"]


def convert(folder, target, *options, before=""):
    code = (
        f"import resource, signal, sys\n{before}\nfrom sparsefmt import cli\nsys.exit(cli.main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "convert", "in.npz", target, *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_a_limit_of_file_sizes_names_the_target(folder, target):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    done = convert(folder, target, before=limit)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"sparsefmt: error: {target}: File too large\n"
    assert [one.name for one in folder.iterdir()] == ["in.npz"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", ["ENOSPC", "EACCES", "EDQUOT", "EIO", "EROFS"])
@pytest.mark.parametrize("when", ["open", "write", "replace"])
def test_errors_of_the_disk_name_the_target(tmp_path, monkeypatch, target, number, when):
    import errno

    A = power_law(400, 3000, community=50, seed=1)
    path = tmp_path / target
    path.write_text("old")
    failure = OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    def fail(self, *_):
        raise OSError(failure.errno, failure.strerror, *([str(self)] if when != "write" else []))

    if when == "write":
        honest = bounded._draft
        monkeypatch.setattr(
            bounded, "_draft", lambda *a: (lambda d, r: (d, Full(r, fail)))(*honest(*a))
        )
    else:
        monkeypatch.setattr(bounded.Path, "replace" if when == "replace" else "open", fail)
    with pytest.raises(OSError, match=number and failure.strerror) as caught:
        write(path, A)
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.filename) == (failure.errno, str(path))
    assert ".tmp" not in str(caught.value)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == [target]


class Full:
    """A file that takes no bytes."""

    def __init__(self, raw, fail):
        self._raw, self.write = raw, fail

    def __getattr__(self, name):
        return getattr(self._raw, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._raw.close()


@pytest.mark.parametrize("target", TARGETS)
def test_force_overwrites_and_nothing_else_does(folder, target):
    (folder / target).write_text("old")
    done = convert(folder, target)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{target} exists: give another name, or --force to overwrite it" in done.stderr
    assert (folder / target).read_text() == "old"
    assert convert(folder, target, "--force").returncode == 0
    assert read(folder / target).nnz == 3000


@pytest.mark.parametrize("text", ['{"a": 1}', "%%MatrixMarket matrix array real general\n1 1\n1\n"])
def test_what_a_user_sees_is_one_line(folder, text):
    (folder / "in.npz").write_text(text)
    done = convert(folder, "out.npz")
    assert done.returncode == 2
    assert done.stderr.startswith("sparsefmt: error: in.npz: it holds ")
    assert done.stderr.count("\n") == 1
