"""One perplexity on every device: a model with quantized activations evaluated so that no last
place decides.

Codes of 4 bits turn differences of a last place into others: a token that lies near a boundary goes
another way, and the perplexity of 30k tokens moves by some 1e-3, between two GPUs as between two
orders of a sum. Its blocks are therefore evaluated with float operations that every device rounds
alike (:mod:`qtool.runtime.deterministic`) around integer kernels that do so anyway. What follows the
last code, the head, is computed as always, and so is a model whose activations have 16 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from transformers import PreTrainedModel

from qtool.kernels.order import groups_in_order
from qtool.runtime.deterministic import deterministic_arithmetic
from qtool.runtime.huggingface import quantized_linears


@contextmanager
def deterministic(model: PreTrainedModel) -> Iterator[None]:
    """In here ``model`` gives the same hidden states on a CPU and on a GPU if it quantizes
    activations.
    """
    linears = quantized_linears(model).values()
    if all(linear.format.scheme_object.activation.bits == 16 for linear in linears):
        yield
        return
    decoder: Any = model.get_decoder()
    forward, own = decoder.forward, "forward" in vars(decoder)

    @wraps(forward)
    def rounded(*args: Any, **kwargs: Any) -> Any:
        with deterministic_arithmetic(), groups_in_order():
            return forward(*args, **kwargs)

    decoder.forward = rounded
    try:
        yield
    finally:
        if own:
            decoder.forward = forward
        else:
            del decoder.forward
