"""vLLM keeps keys and values as the checkpoint says: the choice, its tensors, the pages, a step.

The classes are the installed vLLM's own, of 0.26 or 0.33; the GPU and FlashAttention are stood in
for. Tests of how pages get into one of the two are skipped with the other.
"""

import pickle
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving")

from vllm.config import set_current_vllm_config
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, get_kv_quant_mode

from qtool.errors import QtoolError
from qtool.format import CheckpointFormat
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.kernels.attention.paged_cache import head_bytes
from qtool.runtime.packed_kv import SCALES
from qtool.runtime.packed_linears import PackedLinears
from qtool.schemes.kv import KV4
from qtool.serving.vllm import attention, kv
from qtool.serving.vllm.engine import EVALUATED
from tests.models.tiny import tiny_config
from tests.serving.conftest import Native, rewritten
from tests.serving.models import configured, loaded
from tests.serving.test_vllm_names import MAMBA, packed

HEADS, DIM = 4, 64  # of the small models
PAGES = kv.offered_pages()
REGISTERED = hasattr(PAGES.QtoolAttentionBackend, "customize_spec")
borrowed = pytest.mark.skipif(REGISTERED, reason="this vLLM registers cache dtypes")
registered = pytest.mark.skipif(not REGISTERED, reason="this vLLM's cache dtypes are a closed list")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made as on a GPU."""
    monkeypatch.setattr(kv, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    ours = kv.backend_path(PAGES)
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", lambda *_, **__: ours)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told about the cache."""
    lines: list[str] = []
    logger = SimpleNamespace(
        warning_once=lambda text, *values: lines.append(text % values),
        info_once=lambda text, *values: None,
    )
    monkeypatch.setattr(kv, "logger", logger)
    return lines


def quantized(native: Native, folder: Path, name: str) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with calibrated tensors of its cache, and these."""
    parts = {"kv8": ("k_scale", "v_scale"), "kv4": ("k_offset", "k_importance")}[name]
    random = torch.Generator().manual_seed(0)
    stored = {part: torch.rand(HEADS, DIM, generator=random) + 0.1 for part in parts}
    full = {f"model.layers.0.self_attn.{part}": tensor for part, tensor in stored.items()}
    return rewritten(native(), folder / name, full, kv=name), stored


def chosen(config: Any, name: str) -> bool:
    """Whether vLLM keeps the cache ``name`` of a checkpoint of the model in ``config``."""
    made = PackedLinears(config.model_config.hf_config.to_dict(), CheckpointFormat("", (), kv=name))
    return kv.choose_cache(config, made)


def attention_layer(model: torch.nn.Module) -> Any:
    [layer] = [m for m in model.modules() if type(m).__name__ == "Attention"]
    return layer


@pytest.mark.parametrize("name", ["kv4", "kv8"])
def test_each_rank_loads_its_heads(
    native: Native, tmp_path: Path, on_cuda: None, said: list[str], name: str
) -> None:
    directory, stored = quantized(native, tmp_path, name)
    for ranks in (1, 2):
        for rank in range(ranks):
            layer = attention_layer(loaded(directory, rank, ranks, dtype="bfloat16"))
            assert isinstance(layer.impl, attention.QtoolAttention)
            assert layer.kv_cache_dtype == PAGES.CACHE_DTYPES[name]
            for part, whole in stored.items():
                mine = whole.chunk(ranks)[rank]
                assert torch.equal(getattr(layer, kv.PREFIX + part), mine)
    assert said == []


def test_heads_are_repeated_on_more_ranks_than_there_are(
    native: Native, tmp_path: Path, on_cuda: None, said: list[str]
) -> None:
    directory, stored = quantized(native, tmp_path, "kv8")
    for rank in range(8):
        layer = attention_layer(loaded(directory, rank, 8, dtype="bfloat16"))
        assert torch.equal(layer.cache_k_scale, stored["k_scale"][rank // 2, None])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 was asked for"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "int4_per_token_head was asked for"),
        ({"attention_backend": "TRITON_ATTN"}, "another attention backend was asked for"),
        ({"block_size": 48}, "--block-size 48 was asked for"),
        ({"dtype": "float32"}, "the model runs in torch.float32"),
        ({"model_impl": "transformers"}, "vLLM runs transformers' model"),
    ],
)
def test_what_the_user_asks_for_counts_and_is_told(
    native: Native,
    tmp_path: Path,
    on_cuda: None,
    said: list[str],
    options: dict[str, Any],
    reason: str,
) -> None:
    directory, _ = quantized(native, tmp_path, "kv4")
    config = configured(directory, **({"dtype": "bfloat16"} | options))
    before = config.cache_config.cache_dtype, config.attention_config.backend
    assert not chosen(config, "kv4")
    assert (config.cache_config.cache_dtype, config.attention_config.backend) == before
    assert len(said) == 1 and reason in said[0]


def test_without_the_hook_or_a_gpu_vllm_keeps_its_own(
    native: Native, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = quantized(native, tmp_path, "kv4")
    layer = attention_layer(loaded(directory, dtype="bfloat16"))
    assert layer.kv_cache_dtype == "auto" and "CUDA GPU" in said[-1]
    monkeypatch.setattr(kv, "AttentionBackend", object)
    config = configured(directory, dtype="bfloat16")
    assert not chosen(config, "kv4") and not chosen(config, "kv4-channel")
    assert "no cache dtype of its size" in said[-2] and "kv4-channel has no kernel" in said[-1]


def test_half_a_hook_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM 0.30 to 0.32, whose backends size pages, but for dtypes of a closed list."""
    monkeypatch.setattr(kv, "AttentionBackend", SimpleNamespace(customize_spec=None))
    monkeypatch.delattr(kv.cache_dtypes, "register_kv_cache_dtype", raising=False)
    assert kv.offered_pages() is None


def test_what_cuts_sequences_or_guesses_ahead_keeps_vllms_cache(
    native: Native, on_cuda: None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(native(), dtype="bfloat16")
    for way in ("decode", "prefill"):
        with monkeypatch.context() as one:
            one.setattr(config.parallel_config, f"{way}_context_parallel_size", 2)
            assert not chosen(config, "kv8")
        assert "context parallelism" in said[-1]
    monkeypatch.setattr(config, "speculative_config", SimpleNamespace())
    assert not chosen(config, "kv8")
    assert "speculative decoding" in said[-1]


def test_recurrent_states_beside_attention_keep_vllms_cache(
    native: Native, on_cuda: None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of Falcon-H1 keep keys and values of one shape, and states too."""
    made = PackedLinears(tiny_config("falcon_h1").to_dict(), CheckpointFormat("", (), kv="kv8"))
    config = configured(native(), dtype="bfloat16")
    assert kv.choose_cache(configured(native(), dtype="bfloat16"), made)
    monkeypatch.setattr(type(config.model_config), "is_hybrid", True)
    assert not kv.choose_cache(config, made)
    assert "the model's recurrent states" in said[-1]


def test_a_hybrid_keeps_vllms_cache(tmp_path: Path, on_cuda: None, said: list[str]) -> None:
    """Its checkpoint is loaded without the tensors of the cache."""
    scales = {f"model.layers.1.self_attn.{part}": torch.ones(2, 32) for part in SCALES}
    directory = packed("granitemoehybrid", tmp_path, **MAMBA)
    layer = attention_layer(loaded(rewritten(directory, tmp_path / "kv8", scales, kv="kv8")))
    assert layer.kv_cache_dtype == "auto" and not hasattr(layer, kv.PREFIX + "k_scale")
    assert "not all blocks keep keys and values of one shape" in said[0]


def test_blocks_whose_caches_differ_keep_vllms(
    native: Native, on_cuda: None, said: list[str]
) -> None:
    """The last blocks of Gemma 3n read keys and values of the first ones."""
    made = PackedLinears(tiny_config("gemma3n_text").to_dict(), CheckpointFormat("", (), kv="kv8"))
    assert not kv.choose_cache(configured(native(), dtype="bfloat16"), made)
    assert "not all blocks keep keys and values of one shape" in said[0]


@pytest.mark.parametrize(
    ("cache", "tensor"),
    [("kv8", "v_scale"), ("kv4", "k_offset"), ("kv4", "k_importance")],
)
def test_absent_and_damaged_tensors_are_named(
    native: Native, tmp_path: Path, on_cuda: None, cache: str, tensor: str
) -> None:
    directory, tensors = quantized(native, tmp_path, cache)
    name = f"model.layers.0.self_attn.{tensor}"
    damaged = rewritten(directory, tmp_path / "less", {}, drop=name)
    with pytest.raises(QtoolError, match=rf"self_attn.attn: {tensor} is missing"):
        loaded(damaged, dtype="bfloat16")
    nan = {name: tensors[tensor] * float("nan")}
    with pytest.raises(QtoolError, match=rf"{tensor}: holds 256 NaN or Inf values"):
        loaded(rewritten(directory, tmp_path / "nan", nan), dtype="bfloat16")
    if tensor != "k_offset":
        zero = {name: torch.zeros(HEADS, DIM)}
        with pytest.raises(QtoolError, match=rf"{tensor} is not a positive number"):
            loaded(rewritten(directory, tmp_path / "zero", zero), dtype="bfloat16")
    narrow = {name: torch.ones(HEADS, DIM // 2)}
    with pytest.raises(QtoolError, match=rf"{tensor} is \[4, 32\]; 4 kv heads of 64 channels"):
        loaded(rewritten(directory, tmp_path / "narrow", narrow), dtype="bfloat16")


def spec_of(name: str, dim: int = DIM, heads: int = HEADS, tokens: int = TOKENS) -> Any:
    """What vLLM makes of a layer that keeps ``name``, before a backend is asked."""
    dtype = PAGES.CACHE_DTYPES[name]
    return FullAttentionSpec(
        block_size=tokens,
        num_kv_heads=heads,
        head_size=dim,
        dtype=STR_DTYPE_TO_TORCH_DTYPE[dtype],
        kv_quant_mode=get_kv_quant_mode(dtype),
    )


def allocated(name: str, pages: int, layout: str = "BLHNC") -> list[Tensor]:
    """The caches of two layers as vLLM allocates them, each ``[pages, HEADS, ...]``."""
    backend = PAGES.QtoolAttentionBackend
    if not REGISTERED:
        shape = backend.get_kv_cache_shape(pages, TOKENS, HEADS, DIM, PAGES.CACHE_DTYPES[name])
        return [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec, layers = backend.customize_spec(spec_of(name)), ["first", "second"]
    size, order = 2 * pages * spec.page_size_bytes, KVCacheLayout[layout]
    strides = interface.compute_layout_strides(spec, pages, len(layers), order)
    tensor = interface.KVCacheTensor(size, layers, strides[0], strides[1])
    raw = torch.zeros(size, dtype=torch.int8)
    return interface.create_kv_cache_views(raw, spec, pages, order, tensor)


@borrowed
def test_the_cache_has_the_shape_that_vllm_allocates() -> None:
    backend = PAGES.QtoolAttentionBackend
    for name, dtype in PAGES.CACHE_DTYPES.items():
        for dim in (64, 96, 128, 256):
            shape = backend.get_kv_cache_shape(5, TOKENS, HEADS, dim, dtype)
            assert torch.Size(shape).numel() == 5 * spec_of(name, dim).page_size_bytes


@registered
def test_vllm_allocates_pages_of_ours() -> None:
    from vllm.config.cache import get_kv_cache_dtype_handler, is_known_kv_cache_dtype
    from vllm.v1.worker.utils import customize_attention_spec

    backend = PAGES.QtoolAttentionBackend
    for (name, dtype), bits in zip(PAGES.CACHE_DTYPES.items(), (4, 8), strict=True):
        assert is_known_kv_cache_dtype(dtype) and get_kv_cache_dtype_handler(dtype).name == dtype
        for dim in (64, 96, 128, 256):
            for heads in (1, 8):
                spec = customize_attention_spec(backend, spec_of(name, dim, heads))
                assert spec.page_size_bytes == heads * head_bytes(bits, dim)
                one = backend.customize_spec(spec_of(name, dim, heads, tokens=1))
                assert one.page_size_bytes * TOKENS == spec.page_size_bytes
                assert backend.customize_spec(spec) == spec == type(spec).merge([spec, spec])
    half = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float16
    )
    assert backend.customize_spec(half) is half


@pytest.mark.parametrize("window", [None, 50])
def test_layers_of_a_model_ask_for_such_pages(
    native: Native, tmp_path: Path, on_cuda: None, window: int | None
) -> None:
    kinds = (FullAttentionSpec, SlidingWindowSpec)
    for name, bits in (("kv4", 4), ("kv8", 8)):
        directory, _ = quantized(native, tmp_path, name)
        layer = attention_layer(loaded(directory, dtype="bfloat16"))
        layer.sliding_window = window
        spec = layer.get_kv_cache_spec(configured(directory, block_size=TOKENS))
        if REGISTERED:
            from vllm.v1.worker.utils import customize_attention_spec

            spec = customize_attention_spec(layer.get_attn_backend(), spec)
            assert spec.kv_quant_mode.is_custom_mode
        assert [isinstance(spec, kind) for kind in kinds] == [not window, bool(window)]
        assert spec.block_size == TOKENS and type(spec).merge([spec, spec]) == spec
        assert spec.page_size_bytes == HEADS * head_bytes(bits, DIM)


@borrowed
def test_a_window_has_vllms_manager_in_every_process() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    full = spec_of("kv4")
    given = {
        f.name: getattr(full, f.name) for f in fields(SlidingWindowSpec) if hasattr(full, f.name)
    }
    window = PAGES.WindowSpec(**given | {"sliding_window": 50})
    there = pickle.loads(pickle.dumps(window))
    assert there == window and there.page_size_bytes == full.page_size_bytes
    assert KVCacheSpecRegistry.get_manager_class(there) is SlidingWindowManager
    assert KVCacheSpecRegistry.get_manager_class(full) is not None


@registered
def test_pages_are_contiguous_in_each_layout() -> None:
    """Bytes that are written to one layer's page are not in another's, and all of a layer's are."""
    for layout in PAGES.QtoolAttentionBackend.supported_kv_cache_layouts():
        for name, bits in (("kv4", 4), ("kv8", 8)):
            layers = allocated(name, 3, layout.name)
            rows = [attention.head_rows(layer) for layer in layers]
            assert all(row.shape == (3, HEADS, head_bytes(bits, DIM)) for row in rows)
            for row in rows:
                assert row.stride()[1:] == (row.shape[2], 1) and row.dtype == torch.uint8
            rows[0].fill_(7)
            assert (layers[0].view(torch.uint8) == 7).all() and not layers[1].any()
    with pytest.raises(RuntimeError, match="view"):
        attention.head_rows(torch.zeros(3, TOKENS, HEADS, 8).transpose(1, 2))


def test_what_the_backend_takes() -> None:
    backend = PAGES.QtoolAttentionBackend
    assert backend.get_preferred_block_size(16) == TOKENS
    assert all(backend.supports_head_size(dim) for dim in (64, 96, 128, 256))
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    assert kv.backend_path(PAGES) == ".".join(backend.full_cls_name())


Step = list[tuple[int, int]]  #: tokens before, and new ones, of each sequence


class Sequences:
    """A layer's cache under random tables, and what each sequence's tokens are."""

    def __init__(self, longest: int, count: int, window: int | None, config: Any) -> None:
        random = torch.Generator().manual_seed(1)
        self.tables = torch.randperm(3 * count, generator=random).view(count, 3).int()
        self.x = torch.randn(3, count, longest, HEADS, DIM, generator=random).bfloat16()
        self.cache = allocated("kv4", 3 * count)[1]
        self.offset = torch.randn(HEADS, DIM, generator=random) + 2
        self.importance = torch.rand(HEADS, DIM, generator=random) + 0.1
        self.layer = SimpleNamespace(
            cache_k_scale=None,
            cache_v_scale=None,
            cache_k_offset=self.offset,
            cache_k_importance=self.importance,
        )
        spec = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8
        )
        with set_current_vllm_config(config):
            self.builder = attention.MetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
            self.attention = attention.QtoolAttention(
                HEADS, DIM, DIM**-0.5, HEADS, sliding_window=window
            )

    def step(self, rows: list[int], step: Step) -> tuple[Tensor, attention.Metadata]:
        """The output of a step over the sequences ``rows``."""
        new = torch.tensor([n for _, n in step])
        bounds = torch.cat([torch.zeros(1, dtype=torch.long), new.cumsum(0)]).int()
        lengths = torch.tensor([before + n for before, n in step], dtype=torch.int32)
        each = [(row, torch.arange(b, b + n)) for row, (b, n) in zip(rows, step, strict=True)]
        q, k, v = (torch.cat([x[row, at] for row, at in each]) for x in self.x)
        slots = torch.cat(
            [self.tables[row, at // TOKENS].long() * TOKENS + at % TOKENS for row, at in each]
        )
        common = CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=lengths,
            num_reqs=len(rows),
            num_actual_tokens=len(q),
            max_query_len=int(new.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=self.tables[rows],
            slot_mapping=slots,
            seq_lens_cpu_upper_bound=lengths,
        )
        metadata = self.builder.build(0, common)
        self.attention.do_kv_cache_update(self.layer, k, v, self.cache, slots)
        out = torch.full_like(q, torch.nan)
        self.attention.forward(self.layer, q, k, v, self.cache, metadata, out)
        return out, metadata


def flash(**given: Any) -> None:
    """FlashAttention's varlen attention, by plain operations."""
    q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
    queries, keys = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    left = given["window_size"][0]
    for b in range(len(queries) - 1):
        one, other = slice(*queries[b : b + 2]), slice(*keys[b : b + 2])
        new, length = one.stop - one.start, other.stop - other.start
        assert new <= given["max_seqlen_q"] and length <= given["max_seqlen_k"]
        at = torch.arange(new)[:, None] + length - new
        token = torch.arange(length)
        seen = (token <= at) & ((token >= at - left) if left >= 0 else True)
        scores = torch.einsum("qhd,khd->hqk", q[one].float(), k[other].float())
        scores = (scores * given["softmax_scale"]).masked_fill(~seen, -torch.inf)
        out[one] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[other].float()).to(out.dtype)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("room", [64, 1000])
def test_chunks_and_decodes_give_what_whole_prompts_do(
    native: Native, monkeypatch: pytest.MonkeyPatch, window: int | None, room: int
) -> None:
    """With new tokens read back from the cache, no cut of a prompt into steps changes anything."""
    monkeypatch.setattr(attention.fa_utils, "flash_attn_varlen_func", flash, raising=False)
    monkeypatch.setattr(attention, "gather_room", lambda config: room)
    config = configured(native(), max_model_len=192, dtype="bfloat16", **EVALUATED)
    whole, parts = (Sequences(150, 3, window, config) for _ in range(2))
    expected, _ = whole.step([0, 1, 2], [(0, 150), (0, 20), (0, 64)])
    each = list(expected.split([150, 20, 64]))
    steps = [
        ([0, 1], [(0, 70), (0, 19)]),
        ([1, 0, 2], [(19, 1), (70, 60), (0, 63)]),  # a decode, a later chunk, a new prompt
        ([2, 0], [(63, 1), (130, 20)]),
    ]
    for rows, step in steps:
        found, metadata = parts.step(rows, step)
        assert metadata.decodes == sum(new == 1 for _, new in step)
        assert all(c.total <= max(room, 150) for c in metadata.prefills)
        done = 0
        for row, (before, new) in zip(rows, step, strict=True):
            wanted = each[row][before : before + new]
            torch.testing.assert_close(found[done : done + new], wanted, rtol=2e-2, atol=2e-2)
            done += new
    assert torch.equal(whole.cache, parts.cache)


def test_new_tokens_are_attended_as_they_came(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        attention.fa_utils, "flash_attn_varlen_func", lambda **c: calls.append(c), raising=False
    )
    config = configured(native(), max_model_len=192, dtype="bfloat16")
    served = Sequences(150, 1, None, config)
    served.step([0], [(0, 100)])
    assert torch.equal(calls[0]["k"], served.x[1, 0, :100])
    served.step([0], [(100, 50)])
    assert torch.equal(calls[1]["k"][100:150], served.x[1, 0, 100:150])
    quantizer, before = KV4(served.offset, served.importance), served.x[1, :, :100].transpose(1, 2)
    stored = quantizer.dequantize(quantizer.quantize(before), torch.bfloat16)
    assert torch.equal(calls[1]["k"][:100], stored[0].transpose(0, 1))


def test_plans_follow_the_capacity_not_the_lengths(native: Native) -> None:
    config = configured(native(), max_model_len=150, dtype="bfloat16")
    served = Sequences(150, 2, None, config)
    served.step([0, 1], [(0, 1), (0, 1)])
    capacities = {served.step([0, 1], [(n, 1), (1, 1)])[1].capacity for n in (1, 70, 140)}
    assert capacities == {150}
