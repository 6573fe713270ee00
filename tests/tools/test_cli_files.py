"""What commands leave behind when they are stopped, and what they say when the disk refuses."""

import errno
import io
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from sparsefmt import plot
from sparsefmt.cli import demo, main
from sparsefmt.generate import power_law
from sparsefmt.io import bounded, edge_list, read, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and limits of Linux")
#: Processes begin as copies of one in which everything is imported.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "matplotlib.figure", "sparsefmt.cli.planning"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "BUDGET", 0.0)  # one run of each measurement
    monkeypatch.setattr(demo, "LEAST", 1)
    for name in ("draw", "draw_demo", "draw_plans"):  # what is drawn does not matter here
        monkeypatch.setattr(plot, name, lambda *_, **__: Figure(figsize=(1, 1)))
    write(tmp_path / "in.npz", power_law(400, 3000, community=50, seed=1))
    return tmp_path


#: Commands that write a picture, without its name.
DRAWING = {
    "plot": ["plot", "in.npz", "-o"],
    "plan": ["plan", "in.npz", "--widths", "64,7", "-o"],
    "demo": ["demo", "in.npz", "--device", "cpu", "-o"],
}
PICTURES = ["out.png", "out.pdf", "out.svg"]


class Slow:
    """A file that reports what it is given, and then takes its time."""

    def __init__(self, stream, pipe):
        self.stream, self.pipe = stream, pipe

    def write(self, block):
        self.stream.write(block)
        self.pipe.send("writing")
        time.sleep(20)


def run_slowly(folder, command, pipe):
    """Run a command in a process of its own, which waits in the middle of writing."""
    os.chdir(folder)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    demo.BUDGET, demo.LEAST = 0.0, 1
    pieces = bounded.writing

    @contextmanager
    def writing(path):
        with pieces(path) as stream:
            yield Slow(stream, pipe)

    edge_list.writing = plot.writing = writing
    plot.draw = plot.draw_demo = plot.draw_plans = lambda *_, **__: Figure(figsize=(1, 1))
    sys.stderr = err = io.StringIO()
    code = main(command)
    pipe.send(err.getvalue().strip())
    sys.exit(code)


def begin(folder, target, *command):
    """A process that has opened its output and does not finish it."""
    here, there = FORKS.Pipe()
    arguments = folder, [*(command or ("convert", "in.npz")), target], there
    process = FORKS.Process(target=run_slowly, args=arguments)
    process.start()
    assert here.recv() == "writing"
    return process, here


def hidden(folder):
    return [one for one in folder.iterdir() if one.name.startswith(".")]


def end(begun, how):
    process, pipe = begun
    os.kill(process.pid, how)
    process.join(15)
    return process.exitcode, pipe.recv() if process.exitcode and process.exitcode > 0 else ""


@pytest.mark.parametrize("ending", ["csv", "txt.gz", "csv.bz2"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(folder, ending, how):
    process = begin(folder, f"out.{ending}")
    assert len(hidden(folder)) == 1
    assert end(process, how) == (130 if how == signal.SIGINT else 143, "")
    assert [one.name for one in folder.iterdir()] == ["in.npz"]


@pytest.mark.parametrize("target", PICTURES)
@pytest.mark.parametrize("command", DRAWING)
def test_a_signal_leaves_the_picture_that_was_there(folder, command, target):
    plot.save(Figure(), folder / target)
    before = (folder / target).read_bytes()
    process = begin(folder, target, *DRAWING[command])
    assert len(hidden(folder)) == 1
    assert end(process, signal.SIGTERM) == (143, "")
    assert (folder / target).read_bytes() == before
    assert {one.name for one in folder.iterdir()} == {"in.npz", target}


def test_the_next_picture_removes_what_a_killed_one_left(folder):
    plot.save(Figure(), folder / "out.png")
    before = (folder / "out.png").read_bytes()
    end(begin(folder, "out.png", *DRAWING["plot"]), signal.SIGKILL)
    assert (folder / "out.png").read_bytes() == before
    assert len(hidden(folder)) == 1
    plot.save(Figure(), folder / "out.png")
    assert hidden(folder) == []


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


def test_files_of_others_are_not_swept_and_the_longest_name_is_written(folder):
    for name in (".out.csv.tmp", ".tmp", f".{'0' * 16}.{'0' * 16}.tmp"):
        (folder / name).write_text("mine")
    write(folder / "out.csv", read(folder / "in.npz"))
    assert len(hidden(folder)) == 3
    path = folder / f"{'x' * 251}.csv"
    write(path, read(folder / "in.npz"))
    assert read(path).nnz == 3000


TARGETS = ["out.npz", "out.mtx", "out.csv", "out.mtx.gz", "out.txt.bz2"]


@contextmanager
def largest_file(size):
    """Let this process write no file beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("target", TARGETS)
def test_a_limit_of_file_sizes_names_the_target(folder, capsys, target):
    with largest_file(1000):
        assert main(["convert", "in.npz", target]) == 2
    assert capsys.readouterr() == ("", f"sparsefmt: error: {target}: File too large\n")
    assert [one.name for one in folder.iterdir()] == ["in.npz"]


@pytest.mark.parametrize("target", PICTURES)
@pytest.mark.parametrize("command", DRAWING)
def test_a_picture_that_does_not_fit_leaves_the_old_one(folder, capsys, command, target):
    plot.save(Figure(figsize=(1, 1)), folder / target)
    before = (folder / target).read_bytes()
    with largest_file(300):
        assert main([*DRAWING[command], target]) == 2
    assert capsys.readouterr().err == f"sparsefmt: error: {target}: File too large\n"
    assert (folder / target).read_bytes() == before
    assert {one.name for one in folder.iterdir()} == {"in.npz", target}


OUTPUTS = {"convert": ["convert", "in.npz"], **DRAWING}


@pytest.mark.parametrize("command", OUTPUTS)
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_no_output_goes_to_a_device_or_pipe(folder, capsys, command, kind):
    target = "out.npz" if command == "convert" else "out.png"
    Path(target).symlink_to("/dev/full") if kind == "device" else os.mkfifo(target)
    for force in ([], ["--force"]):
        assert main([*OUTPUTS[command], target, *force]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"sparsefmt: error: {target}: it is a device, pipe or socket")
    assert Path(target).is_symlink() or Path(target).is_fifo()


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_need_not_be_readable(folder, monkeypatch, capsys, command):
    target = Path("out.npz" if command == "convert" else "out.png")
    target.write_text("old")
    honest = Path.open

    def refuse(self, *how, **options):
        if self == target:
            raise PermissionError(13, "Permission denied", str(self))
        return honest(self, *how, **options)

    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(Path, "open", refuse)
    assert main([*OUTPUTS[command], str(target)]) == 2
    found = r"error: out\.\w+ exists.*: give another name, or --force to overwrite it\."
    assert re.search(found, capsys.readouterr().err)
    assert main([*OUTPUTS[command], str(target), "--force"]) == 0
    monkeypatch.undo()
    assert target.name in capsys.readouterr().out
    assert (folder / target).read_bytes()[:4] in (b"PK\x03\x04", b"\x89PNG")


HELD = {
    "empty": (b"", True),
    "PNG": (b"\x89PNG\r\n\x1a\n", True),
    "PDF": (b"%PDF-1.4\n", True),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", True),
    "drawn SVG": (b'\n<?xml version="1.0"?>\n<!-- <b> -->\n<!-- -- -->\n<svg\n/>', True),
    "SVG with a type": (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "x">', True),
    "text": (b"my notes", False),
    "a graph": (b"PK\x03\x04", False),
    "half a signature": (b"\x89PN", False),
    "HTML around an SVG": (b"<html><svg/></html>", False),
    "a commented SVG": (b"<!-- <svg> --><html/>", False),
    "comments without end": (b"<!---->" * 5000 + b"<!--", False),
}


@pytest.mark.parametrize("case", HELD)
@pytest.mark.parametrize("command", DRAWING)
def test_only_pictures_are_replaced_without_force(folder, capsys, command, case):
    content, replaced = HELD[case]
    Path("out.png").write_bytes(content)
    assert main([*DRAWING[command], "out.png"]) == (0 if replaced else 2)
    out, err = capsys.readouterr()
    if not replaced:
        says = "out.png exists and is no picture: give another name, or --force to overwrite it."
        assert says in err
        assert (out, Path("out.png").read_bytes()) == ("", content)
        assert main([*DRAWING[command], "out.png", "--force"]) == 0
    assert plot.is_picture(Path("out.png"))


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_what_is_drawn_is_seen_to_be_a_picture(tmp_path, suffix):
    plot.save(Figure(), tmp_path / f"out{suffix}")
    assert plot.is_picture(tmp_path / f"out{suffix}")


@pytest.mark.parametrize("target", [*TARGETS, *PICTURES])
@pytest.mark.parametrize("number", ["ENOSPC", "EACCES", "EDQUOT", "EIO", "EROFS"])
@pytest.mark.parametrize("when", ["open", "write", "replace"])
def test_errors_of_the_disk_name_the_target(tmp_path, monkeypatch, target, number, when):
    A = power_law(400, 3000, community=50, seed=1)
    path, code, honest = tmp_path / target, getattr(errno, number), bounded._draft
    path.write_text("old")

    def fail(self, *_):
        raise OSError(code, os.strerror(code), *([str(self)] if when != "write" else []))

    def full(*arguments):
        draft, raw = honest(*arguments)
        return draft, Full(raw, fail)

    if when == "write":
        monkeypatch.setattr(bounded, "_draft", full)
    else:
        monkeypatch.setattr(bounded.Path, when, fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        plot.save(Figure(figsize=(1, 1)), path) if target in PICTURES else write(path, A)
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.filename) == (code, str(path))
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
def test_force_overwrites_and_nothing_else_does(folder, capsys, target):
    (folder / target).write_text("old")
    assert main(["convert", "in.npz", target]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{target} exists: give another name, or --force to overwrite it" in err
    assert (folder / target).read_text() == "old"
    assert main(["convert", "in.npz", target, "--force"]) == 0
    assert main(["convert", target, target, "--format", "csc", "--force"]) == 0
    assert read(folder / target) == read(folder / "in.npz").sorted_indices()
