"""Float operations rounded once: the same bits on devices that disagree in every last place."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe  # noqa: F401  (registers its grouped matmul)

from qtool.models.experts import separate_experts
from qtool.runtime import deterministic
from qtool.runtime.deterministic import attention, bit_exact, deterministic_arithmetic
from tests.conftest import SMALL, VARIANTS

#: reductions and functions, which IEEE 754 does not specify to the bit
INEXACT = [
    "mean",
    "sum",
    "cos",
    "sin",
    "exp",
    "log",
    "pow",
    "rsqrt",
    "sqrt",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "softplus",
    "_softmax",
    "native_layer_norm",
    "_scaled_dot_product_flash_attention_for_cpu",
]
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


class Device(TorchDispatchMode):
    """Whose inexact operations are off by a last place, and whose products add in an order of their
    own.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS:  # exact in float64 if the factors are of 16 bits, in any order
            *rest, a, b = args
            order = torch.randperm(a.shape[-1], generator=self.random)
            return func(*rest, a[..., order], b[..., order, :], **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        return tree_map(self.noisy, result) if name in INEXACT else result

    def noisy(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        off = torch.randint(-1, 2, x.shape, generator=self.random)
        return x * (1 + off.to(x.dtype) * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_devices_agree_on_every_family(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    settings = {
        key: value for key, value in (SMALL | VARIANTS[variant]).items() if value is not None
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(variant.split("-")[0], **settings)
    )
    separate_experts(model)  # as in a quantized one
    model, tokens = model.bfloat16().eval(), torch.randint(3, 320, (2, 24))
    softmax = torch.softmax

    def hidden(seed: int, rounded: bool) -> Tensor:
        device = Device(seed)
        # the attention's
        monkeypatch.setattr(torch, "softmax", lambda *a, **k: device.noisy(softmax(*a, **k)))
        with torch.no_grad(), device, deterministic_arithmetic() if rounded else nullcontext():
            return model.get_decoder()(tokens, use_cache=False).last_hidden_state

    assert torch.equal(hidden(1, True), hidden(2, True))
    plain, other = hidden(1, False), hidden(2, False)
    assert not torch.equal(plain, other)
    assert (hidden(1, True) - plain).norm() < 0.03 * plain.norm()


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a quotient by a number": (lambda x: x / 7, ()),
    "a sum with a factor": (lambda x: torch.add(x, x.roll(1), alpha=0.3), ()),
    "a dtype asked for": (lambda x: x.mean(-1, dtype=torch.float32), ()),
    "softmax into float32": (lambda x: functional.softmax(x, -1, dtype=torch.float32), ()),
    "several results": (lambda x: torch.var_mean(x, -1)[1], ()),
    "a scale without dimensions": (
        lambda x, s: torch.addcmul(x, x, s),
        (torch.tensor(0.5, dtype=torch.float64),),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_float64s_in_their_own_dtype(name: str, dtype: torch.dtype) -> None:
    function, more = CALLS[name]
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    with deterministic_arithmetic():
        found = function(x, *more)
    assert found.dtype == function(x, *more).dtype
    wide = {
        "a dtype asked for": x.double().mean(-1),
        "softmax into float32": x.double().softmax(-1),
    }
    assert torch.equal(
        found,
        wide.get(name, function(x.double(), *more) if name not in wide else None).to(found.dtype),
    )


def test_operations_in_place_and_views_stay_so() -> None:
    x = torch.randn(4, 6)
    want, whole = x.double().exp().float(), x
    with deterministic_arithmetic():
        row = x[1]
        assert row.exp_() is row and x.mul_(1) is whole
    assert torch.equal(x[1], want[1]) and not torch.equal(x[0], want[0])


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_given_result_takes_the_shape_that_it_gets() -> None:
    x, out = torch.randn(4, 6), torch.zeros(())
    with deterministic_arithmetic():
        found = torch.sum(x, 1, out=out)
    assert found is out
    torch.testing.assert_close(out, x.sum(1))


def test_of_equals_the_first_are_chosen() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    with deterministic_arithmetic():
        values, indices = torch.topk(x, 2)
    assert values.tolist() == [[3, 3], [2, 2]] and indices.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize(
    "grouped_mm", [torch._grouped_mm, torch.ops.transformers.grouped_mm_fallback]
)
def test_each_group_has_a_matrix_of_its_own(grouped_mm: Callable[..., torch.Tensor]) -> None:
    """A group may be empty."""
    x, weight = torch.randn(5, 8), torch.randn(3, 8, 8)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    with deterministic_arithmetic():
        y = grouped_mm(x, weight.mT, ends)
    products = x.double() @ weight.double().mT  # [3, 5, 8], of which each row needs one
    assert torch.equal(y, products[[0, 0, 2, 2, 2], range(5)].float())


def test_what_is_marked_is_left_alone() -> None:
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    with deterministic_arithmetic():
        once, native = x @ y, bit_exact(torch.mm)(x, y)
    assert torch.equal(once, (x.double() @ y.double()).float()) and torch.equal(native, x @ y)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "tokens", "dim"), [(4, 2, 300, 300, 8), (4, 4, 7, 50, 12)]
)
@pytest.mark.parametrize("mask", ["none", "causal", "shared", "by head", "float", "nothing seen"])
def test_attention_is_torchs(
    heads: int,
    kv_heads: int,
    rows: int,
    tokens: int,
    dim: int,
    mask: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, rows, 8, generator=random)
    key, value = (torch.randn(2, kv_heads, tokens, d, generator=random) for d in (8, dim))
    given = {
        "shared": torch.rand(2, 1, rows, tokens, generator=random) > 0.3,
        "by head": torch.rand(1, heads, rows, tokens, generator=random) > 0.3,
        "float": torch.randn(rows, tokens, generator=random)[None, None],
        "nothing seen": torch.zeros(2, 1, rows, tokens, dtype=torch.bool),
    }.get(mask)
    wide = given.double() if mask == "float" and given is not None else given
    how = {"is_causal": mask == "causal", "scale": 0.3, "enable_gqa": True}
    double = (query.double(), key.double(), value.double())
    want = functional.scaled_dot_product_attention(*double, wide, **how).float()  # type: ignore[arg-type]
    for scores in (2**17, 1):
        monkeypatch.setattr(deterministic, "SCORES", (scores, scores))
        torch.testing.assert_close(
            attention(query, key, value, given, **how), want, rtol=1e-6, atol=1e-7
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [None, (5, 7), (1, 7), (4, 5, 7), (1, 5, 7)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_attention_takes_all_shapes_that_torchs_takes(
    batch: tuple[int, ...], shape: tuple[int, ...] | None
) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(*batch, 4, 5, 8, generator=random)
    key = torch.randn(*batch, 4, 7, 8, generator=random)
    mask = None if shape is None else torch.randn(shape, generator=random)
    want = functional.scaled_dot_product_attention(query, key, key, mask)
    torch.testing.assert_close(attention(query, key, key, mask), want, rtol=1e-5, atol=1e-6)
    assert attention(query[..., :0, :], key, key).shape == (*batch, 4, 0, 8)
