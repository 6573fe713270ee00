"""The entry point of the command line: exit codes, and errors as one line.

The commands themselves are in ``commands``, which needs the extra ``sparsefmt[cli]``; nothing here
does, so that a base install can say what is missing.
"""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from ..errors import SparseFmtError

OK, FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
#: What the extra brings; a missing one is the user's to install, any other is a bug to show.
EXTRA = ("click", "rich", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sparsefmt`` with these arguments (``sys.argv``'s by default); return the exit code.

    0: done; 1: ``demo`` or ``doctor`` found something wrong; 2: bad options or bad input, with one
    line on stderr; 130: interrupted; 143: terminated.  Text for a closed stream is dropped.
    """
    with _open_streams():
        try:
            with _orderly_end():
                code = _run(arguments)
            sys.stdout.flush()
        except KeyboardInterrupt:
            return INTERRUPTED
        except _Terminated:
            return TERMINATED
        except OSError as error:
            return _refuse_os(error)
        return code


class _Terminated(BaseException):
    """The exception of SIGTERM and SIGHUP: unfinished files are removed on the way out."""


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP to an exception that ends the command."""

    def end(*_: object) -> None:
        raise _Terminated

    mine = threading.current_thread() is threading.main_thread()
    names = [name for name in ("SIGTERM", "SIGHUP") if mine and hasattr(signal, name)]
    signals = [getattr(signal, name) for name in names]
    caught = [s for s in signals if signal.getsignal(s) == signal.SIG_DFL]  # not under nohup
    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _open_streams() -> Iterator[None]:
    """Replace closed streams (None, ``>&-``) by the null device; let all streams take any text."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:
                stream = stack.enter_context(Path(os.devnull).open("w"))
                stack.enter_context(redirect(stream))
            if isinstance(stream, io.TextIOWrapper):
                # a file name that the terminal cannot show
                stream.reconfigure(errors="backslashreplace")
        yield


def _run(arguments: Sequence[str] | None) -> int:
    try:
        import click

        from .planning import sparsefmt  # with the commands of all files
    except ModuleNotFoundError as error:
        return _refuse_missing(error)
    try:
        code = sparsefmt.main(arguments, prog_name="sparsefmt", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        context = getattr(error, "ctx", None)  # where options were wrong
        hint = f". Try '{context.command_path} --help'." if context else "."
        return _refuse(error.format_message().rstrip(".") + hint)
    except (SparseFmtError, MemoryError) as error:
        return _refuse(str(error) or "out of memory")
    except ModuleNotFoundError as error:
        return _refuse_missing(error)
    return code if isinstance(code, int) else OK


def _refuse(message: str) -> int:
    print("sparsefmt: error:", " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT


def _refuse_missing(error: ModuleNotFoundError) -> int:
    library = (error.name or "").partition(".")[0]
    if library not in EXTRA:
        raise error
    return _refuse(f"the command line needs {library}: pip install 'sparsefmt[cli]'")


def _refuse_os(error: OSError) -> int:
    if error.errno == errno.EPIPE:
        # The reader has gone.  What is left in the buffer must not be written at exit either.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return FAILED
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return _refuse(where + (error.strerror or str(error) or type(error).__name__))
