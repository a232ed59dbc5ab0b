"""What a command that fails prints, and its exit code."""

import sys
import traceback

import click

from qtool import plugins
from qtool.errors import CheckFailed, QtoolError

#: advice after Ctrl-C, by command
INTERRUPTED = {
    "quantize": "; finished shards are kept: the same command with --resume continues",
    "export": "; finished shards are kept, but for GGUF: the same command continues",
    "import": "; finished shards are kept: the same command continues",
    "eval": "; with --save each finished task is kept",
}
#: what a user can mend, by its message; OSError means no permission, no space or no such path
MISTAKES = (QtoolError, OSError, click.ClickException)


def known(error: BaseException) -> BaseException:
    """``error``, or what names the plugin whose code raised it if nothing else does."""
    if isinstance(error, (*MISTAKES, click.Abort, KeyboardInterrupt)):
        return error
    return plugins.raised_in(error) or error


def exit_code(error: BaseException) -> int:
    """2 for bad usage or bad input, 130 for an interruption, 1 for a failed check or a defect."""
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, MISTAKES) and not isinstance(error, CheckFailed) else 1


def show(error: BaseException) -> None:
    """Print a sentence for the user; a traceback for a defect of qtool, or with --debug."""
    if isinstance(error, click.Abort | KeyboardInterrupt):
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        click.echo(f"qtool: interrupted{INTERRUPTED.get(command, '')}", err=True)
    elif isinstance(error, click.ClickException):
        error.show()
    elif isinstance(error, QtoolError | OSError):
        if "--debug" in sys.argv:
            traceback.print_exception(error)
        click.echo(f"qtool: {_sentence(error)}", err=True)
    else:
        traceback.print_exception(error)


def _sentence(error: QtoolError | OSError) -> str:
    if isinstance(error, OSError) and error.filename:
        # the second file name is the target of a copy
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return str(error)
