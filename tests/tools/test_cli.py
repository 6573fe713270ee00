"""The command line: what each command prints and writes, and how each refusal reads."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from sparsefmt import cli, errors, plot
from sparsefmt import io as graph_io
from sparsefmt.cli import commands, demo, doctor, planning
from sparsefmt.generate import power_law
from sparsefmt.ops.engine import jit

ROOT = Path(__file__).resolve().parents[2]
MTX = "%%MatrixMarket matrix coordinate real general\n3 4 3\n1 2 0.5\n3 1 0\n3 4 -2\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current directory of a new user, with two graphs in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "BUDGET", 0.0)  # one run of each measurement
    monkeypatch.setattr(demo, "LEAST", 1)
    Path("small.mtx").write_text(MTX)
    A = power_law(400, 3000, community=50, seed=1).tocsr()
    np.savez("graph.npz", indptr=A.indptr, indices=A.indices, shape=np.array(A.shape, np.int32))
    return tmp_path


@pytest.fixture
def sparsefmt(capsys):
    """``sparsefmt("info", "x.npz")`` -> exit code, stdout, stderr."""

    def run(*arguments: str) -> SimpleNamespace:
        code = cli.main(list(arguments))
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def in_process(*arguments: str, code: str = "", shell=(), **variables):
    start = ["-c", code] if code else ["-m", "sparsefmt"]
    variables = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"} | variables
    command = [*shell, sys.executable, *start, *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


# What commands do


@pytest.mark.parametrize("name", sorted(planning.sparsefmt.commands))
def test_every_command_has_help_within_80_columns(name):
    whole = planning.sparsefmt  # with the commands of all files
    done = CliRunner().invoke(whole, [name, "--help"])
    assert done.exit_code == 0
    assert f"Usage: sparsefmt {name}" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    if name in ("plot", "plan", "demo"):
        words = " ".join(done.output.split())
        assert "Replaces a picture of that name." in words
        assert "--force Overwrite a file that is no picture, too." in words
    assert "..." not in CliRunner().invoke(whole, ["-h"]).output.split("Commands:")[1]


def test_without_a_command_the_help_is_shown(sparsefmt):
    done = CliRunner().invoke(commands.sparsefmt, [])
    assert done.exit_code == 0
    assert "Commands:" in done.output
    assert "sparsefmt demo" in done.output
    done = sparsefmt("--version")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("sparsefmt ")


def test_info_counts_what_is_in_the_file(folder, sparsefmt):
    done = sparsefmt("info", "small.mtx")
    assert (done.code, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "small.mtx"
    for line in (
        "vertices (rows x columns) 3 x 4",
        "stored entries 3, one in 4 cells",
        "values float64",
        "symmetric pattern no, rectangular",
        "self loops 0",
        "in (row) 0 1.00 1 2 0.82 1 0.444 66.7%",
    ):
        assert line in lines
    # One window of rows; columns 0, 1 and 3 lie in one tile already.
    assert "16x8 1 2.34% 1 2.34% 0.0%" in lines
    assert any(line.startswith("CSR 52 B") for line in lines)


def test_info_fits_80_plain_columns(folder, sparsefmt):
    done = sparsefmt("info", "graph.npz")
    assert "values                     none (unweighted)" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert done.out.isascii()
    assert "\x1b" not in done.out
    Path("empty.mtx").write_text("%%MatrixMarket matrix coordinate pattern general\n3 3 0\n")
    done = sparsefmt("info", "empty.mtx")
    assert done.code == 0
    assert "stored entries             none" in done.out


@pytest.mark.parametrize("format_", ["csr", "csc", "coo", "sgt"])
def test_convert_keeps_the_graph(folder, sparsefmt, format_):
    done = sparsefmt("convert", "small.mtx", "out.npz", "--format", format_)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"wrote out.npz: {format_.upper()}(3 x 4, ")
    A = graph_io.read("small.mtx")
    assert graph_io.read("out.npz") == A


def test_convert_takes_a_tile_shape_keeps_that_of_a_file_and_rounds(folder, sparsefmt):
    done = sparsefmt("convert", "graph.npz", "a.npz", "--format", "sgt", "--tile", "8X4")
    assert done.code == 0
    assert "tile=(8, 4)" in done.out
    assert "tile=(8, 4)" in sparsefmt("convert", "a.npz", "b.npz", "--format", "sgt").out
    done = sparsefmt("convert", "small.mtx", "half.npz", "--dtype", "float16")
    assert "float16 values" in done.out


@pytest.mark.parametrize("command", [["info"], ["plot"], ["demo", "--device", "cpu"]])
def test_values_that_would_be_rounded_need_a_dtype(folder, sparsefmt, command):
    integers = MTX.replace("real", "integer").replace("0.5", str(2**53 + 1)).replace("-2", "7")
    Path("big.mtx").write_text(integers)
    done = sparsefmt(*command, "big.mtx")
    assert done.code == 2
    assert "dtype" in done.err
    assert sparsefmt(*command, "big.mtx", "--dtype", "float32").code == 0


DRAWN = {
    "plot graph.npz": "spy.png",
    "plot graph.npz -o a.svg": "a.svg",
    "plot graph.npz --output b.PDF --tile 4x4": "b.PDF",
    "plan graph.npz --widths 64,7 -o c.png": "c.png",
}


@pytest.mark.parametrize("command", DRAWN)
def test_commands_draw_pictures(folder, sparsefmt, command):
    done = sparsefmt(*command.split())
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1].startswith(f"wrote {DRAWN[command]}")
    assert command.startswith("plan") or done.out == f"wrote {DRAWN[command]}\n"
    assert Path(DRAWN[command]).stat().st_size > 5000


def test_the_demo_s_picture_names_the_features_that_were_multiplied(tmp_path, monkeypatch):
    A, save = power_law(30, 90, seed=1), Mock()
    outcome = replace(demo.run(A, "cpu"), features=7)
    monkeypatch.setattr(plot, "save", save)
    demo.picture(A, outcome, "a graph", "a machine", tmp_path / "demo.png")
    titles = [axes.get_title(loc="left") for axes in save.call_args.args[0].axes]
    assert "SpMM: A @ X, 7 float32 features" in titles


@pytest.mark.parametrize("name", ["[bold]x[red].npz", "a:smile:b.npz", "\u56fe.npz", "a b.npz"])
def test_names_are_printed_as_they_are(folder, sparsefmt, name):
    done = sparsefmt("convert", "small.mtx", name)
    assert done.code == 0
    assert f"wrote {name}: CSR(" in done.out
    assert name in sparsefmt("info", name).out.splitlines()
    assert name in sparsefmt("convert", "small.mtx", name).err


def test_the_module_ends_with_the_exit_code(folder, monkeypatch, capsys):
    for path, code in (("small.mtx", 0), ("none.npz", 2)):
        monkeypatch.setattr(sys, "argv", ["sparsefmt", "info", path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("sparsefmt", run_name="__main__")
        assert ended.value.code == code
        out, err = capsys.readouterr()
        assert (out if code == 0 else err).find(path) >= 0


def test_output_that_the_terminal_cannot_show_is_escaped(folder):
    Path("\u56fe.mtx").write_text(MTX)
    done = in_process("info", "\u56fe.mtx", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.startswith("\\u56fe.mtx\n")


def test_progress_is_shown_on_a_terminal_only(folder, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    jit.tell()  # nobody listens
    with commands._progress(2) as step:
        step("reading [x]")
        step("CSR @ X")
        jit.tell()  # it waits for a compiler
    assert "CSR @ X: compiling" in capsys.readouterr().err
    monkeypatch.setattr(Console, "is_terminal", False)
    with commands._progress(2) as step:
        assert step("anything") is None


# What is refused: one line on stderr, exit code 2, nothing written


BAD = {
    "unknown command": (["bogus"], r"No such command 'bogus'\. Try 'sparsefmt --help'\."),
    "unknown option": (["info", "--bogus"], "No such option '?--bogus"),
    "no path": (["info"], "Missing argument 'PATH'"),
    "no target": (["convert", "graph.npz"], "Missing argument 'OUT'"),
    "too many arguments": (["doctor", "x"], r"unexpected extra argument \(x\)"),
    "missing file": (["info", "none.npz"], r"none\.npz"),
    "missing file to plot": (["plot", "none.mtx"], r"none\.mtx"),
    "missing file for the demo": (["demo", "none.npz"], r"none\.npz"),
    "missing file to convert": (["convert", "none.npz", "out.npz"], r"none\.npz"),
    "a folder": (["info", "."], r"\."),
    "a path through a file": (["info", "graph.npz/x.npz"], "Not a directory|graph.npz/x.npz"),
    "unknown ending": (["info", "graph.xyz"], r"graph\.xyz"),
    "empty file": (["info", "empty.npz"], r"empty\.npz"),
    "no zip": (["info", "text.npz"], r"text\.npz"),
    "members missing": (["info", "members.npz"], r"members\.npz.*indptr"),
    "pickled objects": (["info", "pickle.npz"], r"pickle\.npz"),
    "no banner": (["info", "banner.mtx"], r"banner\.mtx"),
    "cut short": (["info", "short.mtx"], r"short\.mtx"),
    "outside the matrix": (["info", "range.mtx"], r"range\.mtx"),
    "unknown format": ("convert a b --format elf".split(), "'elf' is not one of 'csr', 'csc'"),
    "cbsr is for features": (["convert", "a", "b", "--format", "cbsr"], "'cbsr' is not one of"),
    "tile of one number": (["convert", "a", "b", "--tile", "16"], "'16' is no tile shape"),
    "tile half empty": (["convert", "a", "b", "--tile", "16x"], "'16x' is no tile shape"),
    "tile of three": (["plot", "a", "--tile", "2x3x4"], "'2x3x4' is no tile shape"),
    "tile of nothing": (["plot", "a", "--tile", "0x8"], r"tile is \(0, 8\): sizes are positive"),
    "tile too large": (["plot", "a", "--tile", "300x300"], "at most 65536 cells"),
    "tile without sgt": ("convert a b --tile 16x8".split(), "--tile is for --format sgt, not csr"),
    "target exists": (["convert", "small.mtx", "graph.npz"], r"graph\.npz exists: .* --force"),
    "target is a folder": (["convert", "small.mtx", "here"], "here: Is a directory"),
    "no folder for the target": (["convert", "small.mtx", "no/out.npz"], "no: no such folder"),
    "target of unknown kind": (["convert", "none.mtx", "out.xyz"], r"out\.xyz.*'\.xyz'"),
    "plot over a graph": (["plot", "small.mtx", "-o", "graph.npz"], "is no picture's name"),
    "plot into a folder": (["plot", "small.mtx", "-o", "here.png"], r"here\.png: Is a directory"),
    "plot into no folder": (["plot", "small.mtx", "-o", "no/a.png"], "no: no such folder"),
    "demo over a graph": (["demo", "-o", "graph.npz"], "is no picture's name"),
    "unknown dtype": (["info", "small.mtx", "--dtype", "int8"], "'int8' is not one of 'float16'"),
    "unknown device": (["demo", "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(folder, sparsefmt, case):
    Path("empty.npz").touch()
    Path("text.npz").write_text("not a zip file")
    Path("graph.xyz").write_text("0 1\n")
    np.savez("members.npz", shape=np.array([2, 2]))
    objects = np.array([{}, None], dtype=object)
    np.savez("pickle.npz", indptr=objects, indices=objects, shape=np.array([2, 2]))
    Path("banner.mtx").write_text("3 3 1\n1 1 1\n")
    Path("short.mtx").write_text(MTX[:-7])
    Path("range.mtx").write_text(MTX.replace("3 1 0", "9 1 0"))
    Path("here").mkdir()
    Path("here.png").mkdir()
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    arguments, message = BAD[case]
    done = sparsefmt(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("sparsefmt: error: ")
    assert "Traceback" not in done.err
    assert re.search(message, done.err), done.err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


PATHS = {
    "info": ["info", "{}"],
    "plot": ["plot", "{}"],
    "demo": ["demo", "{}"],
    "plan": ["plan", "{}", "--widths", "64,7"],
    "convert": ["convert", "{}", "out.npz"],
    "target": ["convert", "small.mtx", "{}"],
    "picture": ["plot", "small.mtx", "-o", "{}"],
    "demo's picture": ["demo", "-o", "{}"],
    "plan's picture": ["plan", "small.mtx", "--widths", "64,7", "-o", "{}"],
}


@pytest.mark.parametrize("case", PATHS)
def test_no_path_is_empty_or_a_standard_stream(folder, sparsefmt, case):
    for path, message in (
        ("", "the path is empty: give the name of a file."),
        ("-", "standard input is not read, nor standard output written: give the name of a file."),
    ):
        done = sparsefmt(*(part.format(path) for part in PATHS[case]))
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert message in done.err
    Path("-").mkdir()  # a folder may have that name
    assert "-: the folder holds no ind.<name>.graph" in sparsefmt("info", "./-").err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_permission_denied_is_refused(folder, sparsefmt):
    Path("graph.npz").chmod(0)
    done = sparsefmt("info", "graph.npz")
    assert done.code == 2
    assert "graph.npz: Permission denied" in done.err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "x.npz"), "x.npz: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("odd"), "odd"),
        (OSError(), "OSError"),
        (MemoryError(), "out of memory"),
        (MemoryError("cannot take 8 GiB"), "cannot take 8 GiB"),
        (errors.OutOfMemoryError("a: 8 GiB\nFree some."), "a: 8 GiB Free some."),
        (errors.DeviceError("no device"), "no device"),
    ],
)
def test_an_error_from_below_is_one_line(folder, sparsefmt, monkeypatch, error, message):
    monkeypatch.setattr(graph_io, "read", Mock(side_effect=error))
    done = sparsefmt("info", "x.npz")
    assert (done.code, done.out, done.err) == (2, "", f"sparsefmt: error: {message}\n")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a bug"), ModuleNotFoundError("no", name="numpy.nothing")]
)
def test_a_bug_is_no_bad_input(folder, sparsefmt, monkeypatch, error):
    monkeypatch.setattr(graph_io, "read", Mock(side_effect=error))
    with pytest.raises(type(error)):
        sparsefmt("info", "x.npz")


def test_base_install_says_what_the_command_line_needs(sparsefmt, monkeypatch):
    monkeypatch.setitem(sys.modules, "click", None)
    done = sparsefmt("--help")
    assert (done.code, done.out) == (2, "")
    assert "needs click: pip install 'sparsefmt[cli]'" in done.err


@pytest.mark.parametrize("library", ["click", "rich", "matplotlib"])
def test_a_missing_library_is_named_with_its_extra(library, folder):
    code = f"import sys; sys.modules[{library!r}] = None\n"
    code += "from sparsefmt.cli import main\nsys.exit(main())"
    done = in_process("plot", "small.mtx", code=code)
    expected = f"the command line needs {library}: pip install 'sparsefmt[cli]'"
    assert done.stderr == f"sparsefmt: error: {expected}\n"
    assert done.returncode == 2
    if library == "matplotlib":
        assert in_process("doctor", code=code).returncode == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, EOFError])
def test_interrupted(sparsefmt, monkeypatch, error):
    monkeypatch.setattr(doctor, "examine", Mock(side_effect=error))
    done = sparsefmt("doctor")
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err
    monkeypatch.setattr(cli, "_run", Mock(side_effect=error))  # before they are loaded
    assert error is EOFError or sparsefmt().code == 130


def test_ctrl_c_leaves_no_traceback():
    code = (
        "import signal, sys\nfrom sparsefmt import cli\nfrom sparsefmt.cli import doctor\n"
        # A shell's background job ignores SIGINT, and so would its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "doctor.examine = lambda: signal.raise_signal(signal.SIGINT)\nsys.exit(cli.main())"
    )
    done = in_process("doctor", code=code)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


CLOSED = {
    "info small.mtx": 0,
    "--help": 0,
    "plot small.mtx": 0,
    "demo small.mtx --device cpu": 0,
    "info none.npz": 2,
    "info --bogus": 2,
}
#: Runs the commands of CLOSED in turn and leaves their exit codes.
IN_TURN = """
import json, sys
from pathlib import Path
from sparsefmt.cli import demo, main
demo.BUDGET, demo.LEAST = 0.0, 1
codes = [main(command.split()) for command in sys.argv[1:]]
Path("codes").write_text(json.dumps(codes))
"""


@pytest.mark.skipif(os.name != "posix", reason="closes streams with a POSIX shell")
@pytest.mark.parametrize(
    "closing", [">&-", "2>&-", pytest.param(">&- 2>&-", marks=pytest.mark.grid), "<&- >&- 2>&-"]
)
def test_closed_streams_are_no_error(folder, closing):
    done = in_process(*CLOSED, code=IN_TURN, shell=["sh", "-c", f'exec "$@" {closing}', "sh"])
    assert done.returncode == 0
    assert json.loads(Path("codes").read_text()) == [*CLOSED.values()]
    assert done.stderr.count("\n") == (2 if "2>&-" not in closing else 0), done.stderr
    assert bool(done.stdout) == (closing == "2>&-")
    assert Path("spy.png").exists()


def test_closed_streams_take_any_text_and_stay_closed(folder, monkeypatch):
    Path("\u56fe.mtx").write_text(MTX)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with cli._open_streams():
        assert (sys.stdout.errors, sys.stderr.errors) == ("backslashreplace",) * 2
    assert cli.main(["info", "\u56fe.mtx"]) == 0
    assert cli.main(["info", "none.mtx"]) == 2
    assert (sys.stdout, sys.stderr) == (None, None)


def test_a_reader_that_leaves_is_no_error():
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    for argument in ("doctor", "--help", "--version"):
        command = [sys.executable, "-m", "sparsefmt", argument]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environment, **pipes) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode in (0, 1)


def test_a_full_buffer_is_dropped_when_the_reader_has_left(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli._refuse_os(BrokenPipeError(32, "Broken pipe")) == 1
        stream.write("lost")
    assert (tmp_path / "out").read_text() == ""
