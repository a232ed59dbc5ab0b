"""A block whose batch does not fit the device runs it in halves, with the same outputs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from qtool.calibration.batch import HIDDEN, Batch, BlockArguments, axes_of, first_inputs
from qtool.calibration.block import Block
from qtool.calibration.forwards import inputs_of, observe, propagate, run
from qtool.calibration.rounding.rounded import Rounded, SimulatedLinear
from qtool.calibration.transforms.smooth_attention import observe_keys
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.models.auto import auto_class
from qtool.models.skeleton import fill, skeleton
from qtool.schemes import get
from qtool.schemes.arithmetic.activation import PER_TOKEN_S8
from tests.conftest import SMALL
from tests.models.tiny import tiny_config


@pytest.fixture
def block_and_batch() -> tuple[Block, Batch]:
    torch.manual_seed(0)
    config, family = LlamaConfig(**SMALL), family_of({"model_type": "llama"})
    model = skeleton(config)
    embedding = model.get_input_embeddings()
    fill(embedding, {"weight": torch.randn(embedding.weight.shape)}, torch.device("cpu"))
    module = model.get_submodule(family.blocks)[0]
    fill(
        module,
        {n: torch.randn(p.shape) / 8 for n, p in module.named_parameters()},
        torch.device("cpu"),
    )
    (batch,) = first_inputs(model, family, [torch.randint(0, 320, (4, 16))])
    return Block(0, module, family, config, {}), batch


def limit(block: Block, sequences: int, where: str = "") -> None:
    def refuse(_, args) -> None:  # type: ignore[no-untyped-def]
        if len(args[0]) > sequences:
            raise torch.OutOfMemoryError("CUDA out of memory")

    block.module.get_submodule(where).register_forward_pre_hook(refuse)


def test_halves_give_the_same_outputs(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch
    whole = run(block, batch)
    limit(block, 1)
    assert torch.allclose(run(block, batch), whole, atol=1e-6)
    assert block.notes["batches halved for lack of memory"] == 3


@pytest.mark.parametrize("length", [16, 4])
@pytest.mark.parametrize(
    "model_type", ["bloom", "mpt", "llama", "xlnet", "cpmant", "gemma3n_text", "deepseek_v4"]
)
@torch.no_grad()
def test_parts_get_their_own_arguments(model_type: str, length: int) -> None:
    """Bloom's ALiBi has a row for each head of each sequence, MPT's for each head: here also 4.

    XLNet has sequences in the second dimension, also where there are as many as tokens; CPM-Ant
    more states than tokens; Gemma 3n and DeepSeek-V4 several streams, before and behind these.
    """
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model = auto_class(config).from_config(config).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    family = family_of(config)
    (batch,) = first_inputs(model, family, [torch.randint(0, 61, (4, length))])
    assert batch.shape == (4, length + getattr(config, "prompt_length", 0))
    block = Block(0, model.get_submodule(family.blocks)[0], family, config, {})
    parts = [{HIDDEN: run(block, batch.part(slice(i, i + 2)))} for i in (0, 2)]
    whole = run(block, batch)
    torch.testing.assert_close(batch.joined(parts)[HIDDEN], whole, rtol=1e-5, atol=1e-5)


def test_an_argument_without_elements_is_for_all_sequences() -> None:
    one, two = ((torch.empty(0), torch.zeros(3, n), torch.zeros(n, 0)) for n in (1, 2))
    axes = axes_of(one, two)
    assert axes == [None, 1, 0]
    arguments = BlockArguments([{"x": two}], [{"x": axes}])
    shapes = [tuple(t.shape) for t in arguments.part(slice(1), 2)[0]["x"]]
    assert shapes == [(0,), (3, 1), (1, 0)]


def test_halves_show_all_inputs(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch
    linear = "mlp.up_proj"
    (whole,) = inputs_of(block, batch, linear)
    limit(block, 1)
    assert torch.allclose(*inputs_of(block, batch, linear), whole, atol=1e-6)
    seen: list[torch.Tensor] = []
    observe(block, [batch], {linear: seen.append})
    assert torch.allclose(torch.cat(seen), whole, atol=1e-6)


def test_halves_show_no_input_twice(block_and_batch: tuple[Block, Batch]) -> None:
    """The memory ends in the MLP, behind linears that have seen the whole batch."""
    block, batch = block_and_batch
    names = ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
    whole = dict(zip(names, inputs_of(block, batch, *names), strict=True))
    limit(block, 1, "mlp.act_fn")
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    observe(block, [batch], {name: inputs.append for name, inputs in seen.items()})
    assert [len(inputs) for inputs in seen.values()] == [1, 1, 4]
    for name, inputs in seen.items():
        torch.testing.assert_close(torch.cat(inputs), whole[name])


def test_a_models_errors_are_told_from_observers(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch

    def fail(*_: object) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match=r"^no$"):
        observe(block, [batch], {"mlp.up_proj": fail})
    block.get("mlp.up_proj").register_forward_pre_hook(fail)
    with pytest.raises(QtoolError, match=r"^transformers cannot run .* \(ValueError: no\)$"):
        run(block, batch)


def test_halves_leave_the_keys_mean(block_and_batch: tuple[Block, Batch]) -> None:
    """Keys of a batch whose memory ends behind the attention are seen more than once."""
    block, batch = block_and_batch
    whole = observe_keys(block, [batch])
    limit(block, 1, "mlp.act_fn")
    halves = observe_keys(block, [batch])
    assert whole and halves and block.notes["batches halved for lack of memory"] == 3
    torch.testing.assert_close(halves.mean, whole.mean)


def test_an_output_that_is_no_number_is_refused(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch
    block.weight("mlp.down_proj")[3] = torch.inf
    with pytest.raises(
        QtoolError, match="block 0: NaN or Inf in its output on the calibration text, in float32"
    ):
        propagate(block, [batch])


def test_one_sequence_that_does_not_fit_is_said(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch
    limit(block, 0)
    with pytest.raises(QtoolError, match="block 0: one sequence of 16 tokens does not fit"):
        run(block, batch)


def test_a_16_bit_module_follows_the_exact_weights(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch
    exact = {name: p.detach().clone() for name, p in block.module.named_parameters()}
    block = replace(block, module=block.module.bfloat16(), exact=exact)
    batch.hidden = batch.hidden.bfloat16()
    batch.kwargs = [to_dtype(kwargs) for kwargs in batch.kwargs]
    run(block, batch)
    block.weight("mlp.up_proj").mul_(3)
    block.change_rows("self_attn.v_proj", lambda rows: rows / 3)
    found = run(block, batch)
    assert torch.equal(block.get("mlp.up_proj").weight, exact["mlp.up_proj.weight"].bfloat16())  # type: ignore[arg-type]
    plain = replace(block, exact={})
    assert torch.equal(run(plain, batch), found)
    assert block.parameters()["mlp.up_proj.weight"].dtype == torch.float32
    scheme = block.schemes["mlp.up_proj"] = get("w8a8")
    params = block.fit("mlp.up_proj")
    codes = scheme.quantize(block.weight("mlp.up_proj"), params)
    block.install({"mlp.up_proj": Rounded(codes, params)})
    block.exact.pop("mlp.up_proj.weight")
    block.weight("mlp.gate_proj").mul_(2)
    run(block, batch)
    assert block.get("mlp.up_proj").weight.dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w4a8-qoq", "w4a8-qoq-g128", "w8a8", "w4a4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rounded_linear_computes_as_its_scheme_multiplies(
    scheme: str, dtype: torch.dtype
) -> None:
    """To the bit where a CPU multiplies integers."""
    torch.manual_seed(0)
    linear, scheme = torch.nn.Linear(128, 24, dtype=dtype), get(scheme)
    x, weight = torch.randn(2, 3, 128, dtype=dtype), linear.weight.float()
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    dequantized = scheme.dequantize(codes, params).to(dtype)
    rounded = SimulatedLinear(linear, scheme, Rounded(codes, params), dequantized)
    expected = scheme.matmul(x.flatten(0, 1), codes, params, linear.bias).view(2, 3, 24)
    if scheme.activation == PER_TOKEN_S8:
        assert torch.equal(rounded(x), expected.to(dtype))
    else:
        assert torch.allclose(rounded(x).float(), expected, rtol=2e-2, atol=2e-2)


def test_a_rounded_linear_follows_its_exact_bias(block_and_batch: tuple[Block, Batch]) -> None:
    block, _ = block_and_batch
    bias = torch.zeros(SMALL["intermediate_size"])
    block.get("mlp.up_proj").bias = torch.nn.Parameter(bias.bfloat16())
    block.exact["mlp.up_proj.bias"] = bias
    scheme = block.schemes["mlp.up_proj"] = get("w8a8")
    params = block.fit("mlp.up_proj")
    codes = scheme.quantize(block.weight("mlp.up_proj"), params)
    block.install({"mlp.up_proj": Rounded(codes, params)})
    block.bias("mlp.up_proj").add_(1)  # type: ignore[union-attr]
    block.update_module()
    assert (block.get("mlp.up_proj").bias == 1).all()  # type: ignore[operator]


def to_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The block's arguments with float tensors in bfloat16."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.bfloat16() if value.is_floating_point() else value
        return type(value)(map(convert, value)) if isinstance(value, tuple) else value

    return {name: convert(value) for name, value in kwargs.items()}


@pytest.mark.parametrize("order", [[0] * 128, list(range(127)), list(range(1, 129))])
def test_an_order_that_is_no_permutation_is_refused(
    block_and_batch: tuple[Block, Batch], order: list[int]
) -> None:
    block, _ = block_and_batch
    with pytest.raises(QtoolError, match="q_proj: its input order is no permutation of 128"):
        block.permute("self_attn.q_proj", torch.tensor(order))
    assert not block.permutations
