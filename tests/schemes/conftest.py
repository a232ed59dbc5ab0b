"""Every scheme at every group size, and weights that are out to break it."""

from functools import cache
from math import lcm

import pytest
import torch
from torch import Tensor

from qtool import schemes
from qtool.schemes import Scheme
from qtool.schemes.protocol import channels

EVERY = [(name, size) for name, kind in schemes.SCHEMES.items() for size in kind.group_sizes]


@pytest.fixture(params=EVERY, ids=lambda p: f"{p[0]}-{p[1] or 'channel'}")
def case(request: pytest.FixtureRequest) -> tuple[str, int | None]:
    """Name and group size of each scheme in turn."""
    return request.param


@pytest.fixture
def scheme(case: tuple[str, int | None]) -> Scheme:
    return schemes.get(*case)


@pytest.fixture
def k(scheme: Scheme) -> int:
    """Input channels that the scheme takes, 1024 or a little more."""
    return channels(scheme)


def adversarial(k: int, size: int) -> dict[str, Tensor]:
    """Weights ``[4, k]`` by what is wrong with them; ``size`` is the group size to aim at."""
    random = torch.randn(4, k, generator=torch.Generator().manual_seed(0))
    outlier = random.clone().mul_(0.01)
    outlier[:, ::size] = 100.0
    constant = torch.arange(k // size).repeat_interleave(size).sub(1).float().expand(4, k).clone()
    alternating = (1.0 - 2 * (torch.arange(k) % 2)).expand(4, k)
    one_row_of_zeros = random.clone()
    one_row_of_zeros[2] = 0
    return {
        "random": random,
        "one outlier a group": outlier,
        "one negative outlier a group": -outlier,
        "constant groups": constant,
        "all zeros": torch.zeros(4, k),
        "a row of zeros": one_row_of_zeros,
        "subnormal": random * 1e-41,
        "smallest subnormal": alternating * 1.4e-45,
        "largest fp16": alternating * 65504,
        "huge": alternating * 1e30,
        "min equals max": torch.full((4, k), 0.3),
        "one-sided positive": random.abs() + 1,
        "one-sided negative": -random.abs() - 1,
        "narrow and far from zero": 5 + random * 1e-3,
        "wide dynamic range": random * torch.logspace(-6, 2, k),
    }


@pytest.fixture
def bad_weights(scheme: Scheme, k: int) -> dict[str, Tensor]:
    return adversarial(k, scheme.group_size or k)


@pytest.fixture
def many_groups(scheme: Scheme) -> Tensor:
    return random_groups(scheme.group_size, scheme.activation.group_size or 1)


@cache
def random_groups(group_size: int | None, inputs: int) -> Tensor:
    """10,000 groups (fewer above 128 channels) of every spread, shift and sparsity.

    Rows are whole groups of ``inputs`` channels too.
    """
    g = torch.Generator().manual_seed(1)
    size = group_size or 64
    count = 10_000 if size <= 128 else (1 << 20) // size
    spread = torch.exp(2 * torch.randn(count, 1, generator=g))
    shift = torch.randn(count, 1, generator=g) * (torch.rand(count, 1, generator=g) < 0.5)
    groups = (torch.randn(count, size, generator=g) + 2 * shift) * spread
    groups *= torch.rand(count, size, generator=g) < torch.rand(count, 1, generator=g)
    width = lcm(size if group_size is None else size * 4, inputs)
    return groups.flatten()[: groups.numel() // width * width].view(-1, width)
