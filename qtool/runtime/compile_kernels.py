"""Compiling the kernels of packed linears in parallel, before a model's first forward."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch

from qtool.runtime.linear import QuantLinear


def compile_kernels(
    linears: Iterable[QuantLinear], counts: Iterable[int], dtype: torch.dtype
) -> None:
    """Run each of ``linears``, whatever its weight, for each of ``counts`` numbers of tokens.

    A kernel is compiled by its first launch, so a forward would compile one after the other.
    """

    def run(linear: QuantLinear, count: int) -> None:
        device = linear.get_buffer("qweight").device
        linear.product(torch.zeros(count, linear.in_features, dtype=dtype, device=device))

    with ThreadPoolExecutor() as threads:
        list(threads.map(run, *zip(*product(linears, dict.fromkeys(counts)), strict=True)))
