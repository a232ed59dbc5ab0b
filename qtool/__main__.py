"""The command ``qtool``, and ``python -m qtool``. Ctrl-C ends it with a sentence at any moment."""

import os
import sys
from types import FrameType

from qtool.distributed.watch import is_first_rank


def main() -> None:
    """Run the command line; exit code 130 at Ctrl-C."""
    try:
        import signal

        signal.signal(signal.SIGINT, _interrupt)
        _open_closed_streams()
        _require_working_directory()
        _require_docstrings()
        if "OMP_WAIT_POLICY" not in os.environ:
            # torch's threads wait awake for moments only: beside other work on the same cores they
            # would wait for each other longer than they compute
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        _keep_freed_memory()
        if not sys.stderr.isatty():  # bars are for terminals; tqdm asks when it is imported
            os.environ.setdefault("TQDM_DISABLE", "1")
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from qtool.cli import main as run

        try:
            run()
        finally:  # another Ctrl-C ends what Python still tidies up
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        _leave()


def _open_closed_streams() -> None:
    """Give a stream that is closed (``2>&-``) the null device.

    A file that is opened later would get its number, and with it what C code prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (until the process ends)


def _require_working_directory() -> None:
    """Exit with code 2 if it was removed: MKL then ends the process when torch is imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print("qtool: the working directory is gone: change to another one", file=sys.stderr)
        sys.exit(2)


def _require_docstrings() -> None:
    """Exit with code 2 if Python removes them: transformers reads those of its models."""
    if sys.flags.optimize > 1:
        print(
            "qtool: Python runs with -OO (PYTHONOPTIMIZE=2), which removes the docstrings that "
            "transformers reads: run it without, or with -O",
            file=sys.stderr,
        )
        sys.exit(2)


def _keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB that were freed, in blocks of up to 32 MiB each.

    By default it returns them to the system, and each large tensor's pages are faulted in again.
    """
    import ctypes

    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # other C libraries have none
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD


def _interrupt(_: int, frame: FrameType | None) -> None:
    """End the process while it imports, and raise KeyboardInterrupt elsewhere.

    An import would drop the exception, where it falls into a callback, or make another of it.
    """
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _leave() -> None:
    if is_first_rank():
        print("\nqtool: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":
    main()
