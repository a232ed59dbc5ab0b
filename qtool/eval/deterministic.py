"""Hidden states with the same bits on all devices.

4-bit codes amplify differences in the last bit of a float: an activation near a rounding boundary
gets another code, and the perplexity of 30k tokens moves by about 1e-3 between two GPUs or two
orders of a sum. With ``deterministic`` the decoder runs float operations that every device rounds
alike (:mod:`qtool.runtime.deterministic`) around integer kernels, which are exact everywhere. The
head, which follows the last code, is computed as always.

Without ``deterministic`` a model runs as it is served: with the kernels of the device, in the
model's own dtype.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, cast
from unittest.mock import patch

from transformers import PreTrainedModel

from qtool.eval.engine import Engine, Model
from qtool.kernels.order import groups_in_order
from qtool.runtime.deterministic import deterministic_arithmetic


def arithmetic(model: Model, deterministic: bool) -> AbstractContextManager[None]:
    """The arithmetic that evaluates ``model``: as served, or :func:`deterministic_decoder`."""
    own = deterministic and not isinstance(model, Engine)
    return deterministic_decoder(cast(PreTrainedModel, model)) if own else nullcontext()


@contextmanager
def deterministic_decoder(model: PreTrainedModel) -> Iterator[None]:
    """Make ``model``'s decoder give the same hidden states on a CPU and on a GPU."""
    decoder: Any = model.get_decoder()
    forward = decoder.forward

    @wraps(forward)
    def rounded(*args: Any, **kwargs: Any) -> Any:
        with deterministic_arithmetic(), groups_in_order():
            return forward(*args, **kwargs)

    with patch.object(decoder, "forward", rounded):
        yield
