"""The command ``qtool``, and ``python -m qtool``. Ctrl-C ends it with a sentence at any moment."""

import sys
from types import FrameType


def main() -> None:
    """Run the command line; exit code 130 at Ctrl-C."""
    try:
        import signal

        signal.signal(signal.SIGINT, _interrupt)
        from qtool.cli import main as run

        try:
            run()
        finally:  # another Ctrl-C ends what Python still tidies up
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        _leave()


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
    import os

    if os.environ.get("RANK", "0") == "0":
        print("\nqtool: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":
    main()
