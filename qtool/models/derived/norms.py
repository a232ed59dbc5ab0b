"""How a norm uses its weight, found by running it on a few random numbers."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

TOLERANCE = 1e-4


@dataclass(frozen=True)
class NormForm:
    """A norm ``n(x) * (weight + offset) + bias``.

    Args:
        centred: n subtracts the mean over channels (LayerNorm), else it does not (RMSNorm).
        biased: there is a bias.
    """

    offset: float
    centred: bool
    biased: bool


@torch.no_grad()
def form_of(norm: nn.Module) -> NormForm | None:
    """The form of ``norm``, on any device and with any values; None for another function."""
    if "weight" not in dict(norm.named_parameters()):
        return None
    try:
        module = copy.copy(norm)
        shapes = {name: p.shape for name, p in norm.named_parameters()}
        module._parameters = {n: nn.Parameter(torch.zeros(s)) for n, s in shapes.items()}
        (size,) = shapes["weight"]
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(3, size, generator=generator) + 0.5 for _ in range(2))
        bias = dict(module.named_parameters()).get("bias")

        def run(x: torch.Tensor, w: torch.Tensor | float, b: float = 0.0) -> torch.Tensor:
            module.weight.copy_(torch.as_tensor(w).expand(size))  # type: ignore[operator]
            if bias is not None:
                bias.fill_(b)
            out = module(x)
            return out[0] if isinstance(out, tuple) else out

        zero, one, some = run(x, 0.0), run(x, 1.0), run(x, weight[0])
    except Exception:  # another function, of other inputs
        return None
    unit = one - zero
    offset = next((k for k in (0.0, 1.0) if torch.allclose(zero, k * unit, atol=TOLERANCE)), None)
    plain = x / x.square().mean(-1, keepdim=True).sqrt()
    centred = torch.nn.functional.layer_norm(x, (size,))
    forms = [torch.allclose(unit, n, rtol=1e-2, atol=1e-2) for n in (plain, centred)]
    linear = torch.allclose(some, zero + unit * weight[0], atol=TOLERANCE)
    if offset is None or not linear or not any(forms):
        return None
    if bias is not None and not torch.allclose(run(x, 1.0, 0.5), one + 0.5, atol=TOLERANCE):
        return None
    return NormForm(offset, forms[1], bias is not None)
