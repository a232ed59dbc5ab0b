"""The command ``qtool``, and ``python -m qtool``: at Ctrl-C it ends with a sentence, at any moment.

Before qtool's own command line can say more, while it is imported, and where Python would go on:
in a callback, whose exceptions it prints and drops.
"""

import signal
import sys
import threading
import time
from typing import Any


def main() -> None:
    """Run the command line; exit code 130 at Ctrl-C."""
    sys.unraisablehook = _raise_again
    try:
        from qtool.cli import main as run

        run()
    except KeyboardInterrupt:
        print("\nqtool: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:  # a second Ctrl-C ends what Python still tidies up
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _raise_again(dropped: Any) -> None:
    """Send a Ctrl-C that fell into a callback to the main thread, out of that callback."""
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
        return

    main_thread = threading.get_ident()  # no other one gets a KeyboardInterrupt

    def interrupt() -> None:
        time.sleep(0.01)
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


if __name__ == "__main__":
    main()
