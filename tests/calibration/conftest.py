"""Tiny random models of every family, with biases, norm weights and outliers that matter."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from qtool.calibration.batch import Batch, first_inputs
from qtool.calibration.block import Block
from qtool.calibration.forwards import propagate, run
from qtool.calibration.method import Norm, Transform
from qtool.calibration.rounding.gptq import gptq
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.models import family_of
from qtool.models.experts import separate_experts
from qtool.schemes import Params, Scheme, get

SMALL = {
    "vocab_size": 61,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FALCON = {
    name: size for name, size in SMALL.items() if name not in ("num_key_value_heads", "head_dim")
}
CONFIGS = {
    "llama-mha-tied": LlamaConfig(
        **SMALL | {"num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
    "llama-gqa-biases": LlamaConfig(**SMALL | {"attention_bias": True, "mlp_bias": True}),
    "mistral": MistralConfig(**SMALL | {"sliding_window": 8}),
    "qwen2": Qwen2Config(**SMALL | {"num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**SMALL | {"head_dim": 32}),
    "phi3": Phi3Config(**SMALL | {"pad_token_id": 0}),
    "gemma": GemmaConfig(**SMALL),
    "gemma2": Gemma2Config(**SMALL | {"sliding_window": 8}),
    "gemma3": Gemma3TextConfig(**SMALL | {"sliding_window": 8}),
    "opt": OPTConfig(
        **SMALL | {"ffn_dim": 160, "word_embed_proj_dim": 96, "num_key_value_heads": None}
    ),
    "falcon": FalconConfig(**FALCON),
    "falcon-new": FalconConfig(**FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": FalconConfig(
        **FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "falcon-rw": FalconConfig(
        **FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}
    ),
    "mixtral": MixtralConfig(**SMALL | {"num_local_experts": 4}),
    "qwen2-moe": Qwen2MoeConfig(**SMALL | MOE | {"shared_expert_intermediate_size": 160}),
    "qwen3-moe": Qwen3MoeConfig(**SMALL | MOE | {"mlp_only_layers": [1]}),
}
WIDE = {
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "ffn_dim": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}
TOKENS = torch.arange(4 * 16).view(4, 16) * 17 % 61


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Run on one thread: models this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(config) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(std=0.2)
    return model


@pytest.fixture(params=CONFIGS)
def any_model(request) -> PreTrainedModel:
    return make_model(CONFIGS[request.param])


@pytest.fixture(params=CONFIGS)
def any_wide_model(request) -> PreTrainedModel:
    """Any model, every input of a linear a multiple of FMPQ's blocks of 128 channels wide."""
    config = copy.deepcopy(CONFIGS[request.param])
    for name, size in WIDE.items():
        if name in config.to_dict():
            setattr(config, name, size)
    return make_model(config)


@pytest.fixture
def llama() -> PreTrainedModel:
    return make_model(CONFIGS["llama-gqa-biases"])


@pytest.fixture
def logits() -> Callable[[PreTrainedModel], Tensor]:
    @torch.no_grad()
    def run(model: PreTrainedModel) -> Tensor:
        return model(TOKENS).logits

    return run


def random_block(
    scheme: Scheme, lengths: Sequence[int], *, hidden_size: int, num_attention_heads: int
) -> tuple[Block, list[Batch]]:
    """A random Llama block with one ``scheme``, and its inputs: two sequences of each length."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_attention_heads // 2,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    family = family_of({"model_type": "llama"})
    tokens = [torch.randint(61, (2, length)) for length in lengths]
    batches = first_inputs(model, family, tokens)
    module = model.get_submodule(family.blocks)[0]
    return Block(0, module, family, config, dict.fromkeys(family.linears(), scheme)), batches


@pytest.fixture
def blocks() -> Callable[..., list[tuple[Block, list]]]:
    """Every block of a model with a scheme for all its linears, and its (full-precision) inputs."""

    @torch.no_grad()
    def make(model: PreTrainedModel, scheme: Scheme | None = None) -> list[tuple[Block, list]]:
        family = family_of(model.config)
        separate_experts(model)
        scheme = scheme or get("w4a8-lqq", 32)
        batches, result = first_inputs(model, family, list(TOKENS.split(2))), []
        for i, module in enumerate(model.get_submodule(family.blocks)):
            own = family.at(model.config, i)
            block = Block(i, module, own, model.config, dict.fromkeys(own.linears(), scheme))
            result.append((block, copy.deepcopy(batches)))
            propagate(block, batches)
        return result

    return make


@pytest.fixture
def transformed(blocks) -> Callable[..., PreTrainedModel]:
    """A copy of a model with transforms applied as the pipeline does, not rounded."""

    @torch.no_grad()
    def apply(
        model: PreTrainedModel, transforms: Sequence[Transform], scheme: Scheme | None = None
    ) -> PreTrainedModel:
        model, family = copy.deepcopy(model), family_of(model.config)
        separate_experts(model)
        if model.config.tie_word_embeddings:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        for transform in transforms:
            transform.prepare(family, model.config)
            head, norm = model.lm_head.weight, model.get_submodule(family.final_norm)
            for name in family.tables:
                table = model.get_submodule(name).weight
                table.data = transform.embedding(table.data)
            before = Norm.of(norm.weight.data, getattr(norm, "bias", None), family.norm_offset)
            head.data = transform.head(head.data, before.gain)
            for part, data in transform.final_norm(before).stored().items():
                getattr(norm, part).data = data.to(head.dtype)
        for block, batches in blocks(model, scheme):
            for transform in transforms:
                transform.apply(block, batches)
        return model

    return apply


@pytest.fixture
def with_outliers() -> Callable[[PreTrainedModel], PreTrainedModel]:
    """The same function with outlier channels: norm weights, up rows, v rows x 50, their readers /
    50.
    """

    @torch.no_grad()
    def inject(model: PreTrainedModel) -> PreTrainedModel:
        model = copy.deepcopy(model)
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[[5, 40]] *= 50
                for reader in readers:
                    reader.weight[:, [5, 40]] /= 50
            scale_rows(mlp.up_proj, 7, 50)
            mlp.down_proj.weight[:, 7] /= 50
            scale_rows(attention.v_proj, 3, 50)
            queries = model.config.num_attention_heads // model.config.num_key_value_heads
            attention.o_proj.weight[
                :, 3 : 3 + attention.head_dim * queries : attention.head_dim
            ] /= 50
        return model

    return inject


def scale_rows(linear: torch.nn.Linear, row: int, factor: float) -> None:
    linear.weight[row] *= factor
    if linear.bias is not None:
        linear.bias[row] *= factor


def attended(block: Block, batches: Sequence[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """The queries and the keys ``[B, H, S, D]`` that attention itself is given in ``block``, batch
    by batch.
    """
    queries, keys = [], []
    attention = torch.nn.functional.scaled_dot_product_attention

    def seen(q: Tensor, k: Tensor, *rest: Tensor, **options: object) -> Tensor:
        queries.append(q)
        keys.append(k)
        return attention(q, k, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
        for batch in batches:
            run(block, batch)
    if not queries:
        pytest.skip("this family's attention is not torch's own")
    return queries, keys


def solve(
    method: Gptq, scheme: Scheme, weight: Tensor, hessian: Hessian
) -> tuple[Tensor, Params, float]:
    """Codes ``[N, K]``, parameters and the damping it took, of one ``weight [N, K]`` float32."""
    (solution,) = gptq.solve([gptq.Problem(scheme, weight, hessian)], method)
    return solution.codes, solution.params, solution.damping
