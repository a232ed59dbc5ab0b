"""Whether the Hugging Face hub answers: asked once, before any library retries for minutes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

PROBE_SECONDS = 5.0


@cache
def reachable() -> bool:
    """Whether the Hugging Face hub (or its mirror, ``HF_ENDPOINT``) answers.

    A process asks once. False where the user asked for offline mode (``HF_HUB_OFFLINE=1``).
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception:  # whatever the http client of the hub library raises
        return False
    return True


@contextmanager
def offline() -> Iterator[None]:
    """Within it ``huggingface_hub`` and ``datasets`` open no connection.

    Caches are read; all else fails at once.
    """
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def access() -> Iterator[None]:
    """Go online where the hub answers, :func:`offline` where it does not, while open."""
    if reachable():
        yield
    else:
        with offline():
            yield
