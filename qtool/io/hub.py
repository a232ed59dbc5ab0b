"""Asks once whether the Hugging Face hub answers, before any library retries for minutes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from unittest.mock import patch

from qtool.errors import in_one_line

PROBE_SECONDS = 5.0


@cache
def reachable() -> bool:
    """Whether the Hugging Face hub (or its mirror, ``HF_ENDPOINT``) answers.

    A process asks once. It is False if the user asked for offline mode (``HF_HUB_OFFLINE=1``).
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception:  # the hub library's http client may raise anything
        return False
    return True


@contextmanager
def offline() -> Iterator[None]:
    """While open, ``huggingface_hub`` and ``datasets`` open no connection.

    Caches are read; any other request fails at once.
    """
    import datasets.config
    from huggingface_hub import constants

    name = "HF_HUB_OFFLINE"
    with patch.object(constants, name, True), patch.object(datasets.config, name, True):
        yield


def access() -> AbstractContextManager[None]:
    """A context that is online if the hub answers, else :func:`offline`."""
    return nullcontext() if reachable() else offline()


def why_not(error: Exception) -> str:
    """Why a request to the hub ended with ``error``, in a few words."""
    cause = f"{type(error).__name__}: {in_one_line(error)}"
    return cause if reachable() else "no connection to the hub"
