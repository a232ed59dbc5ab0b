"""Run GGUF exports in llama.cpp on a CPU and compare logits.

    pip install llama-cpp-python
    python benchmarks/serving/through_llama_cpp.py [NATIVE ...]

Native checkpoints are exported and evaluated on the demo's text. Without any, random models of
CASES are made, quantized to w4a16 and to w8a8, and evaluated on random tokens. It prints rows of a
table: the perplexity of qtool's float32 model with the dequantized weights and of llama.cpp (one
thread, cache in half precision), the distance of llama.cpp's logits, and how often the best token
is the same. Since llama.cpp rounds activations to int8, it also runs a copy with float32 tensors;
the last distance is the remaining difference of its model from ours (its GELU is a table in half
precision). The exit code is 1 if that distance is beyond the limit.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import qtool
from qtool import recipes
from qtool.data import corpora
from qtool.exchange.export import export
from qtool.exchange.gguf.write import FILE
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.runtime.huggingface import dequantized

try:
    import gguf
    from llama_cpp import Llama
except ImportError:
    sys.exit("through_llama_cpp.py: llama-cpp-python is not installed: pip install gguf and that")

LIMIT, TOKENS, FLOAT32 = 2e-3, 250, 0
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "pad_token_id": 0}
PLAIN: dict[str, Any] = SIZES | {"tie_word_embeddings": False, "max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
BOTH = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
TIED = {"tie_word_embeddings": True}
MIX = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 128}
MIX |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 256}
GEMMA = TIED | {"query_pre_attn_scalar": 64, "sliding_window": 32, "num_hidden_layers": 7}
CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
WIDE = GEMMA | {"query_pre_attn_scalar": 32, "num_attention_heads": 8}
GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.02, "logits_scaling": 4.0}
GRANITE |= {"residual_multiplier": 0.3}
#: by printed name: the model type, and the settings that differ from PLAIN
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama, tied": ("llama", TIED),
    "Llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, Llama 3's RoPE": ("llama", {"rope_parameters": LLAMA3}),
    "Llama, linear RoPE": ("llama", {"rope_parameters": LINEAR}),
    "Llama, one kv head of 96": ("llama", {"num_key_value_heads": 1, "head_dim": 96}),
    "Mistral, heads of 128": ("mistral", {"sliding_window": None, "head_dim": 128}),
    "Mixtral": ("mixtral", MIX),
    "Qwen 2": ("qwen2", {}),
    "Qwen 2, tied, one kv head": ("qwen2", TIED | {"num_key_value_heads": 1}),
    "Qwen 3": ("qwen3", {}),
    "Qwen 3, tied, heads of 128": ("qwen3", TIED | {"head_dim": 128}),
    "Qwen2-MoE": ("qwen2_moe", MIX),
    "Qwen3-MoE, heads of 128": ("qwen3_moe", MIX | {"norm_topk_prob": True, "head_dim": 128}),
    "Gemma, one kv head of 128": ("gemma", TIED | {"num_key_value_heads": 1, "head_dim": 128}),
    "Gemma 2, caps of 1 and 2": ("gemma2", GEMMA | CAPS),
    "Gemma 2, 46 blocks": ("gemma2", WIDE | {"num_hidden_layers": 46}),
    "Gemma 3": ("gemma3_text", GEMMA | {"rope_parameters": BOTH}),
    "Gemma 3, 62 blocks": ("gemma3_text", WIDE | {"num_hidden_layers": 62}),
    "Phi-3": ("phi3", {"sliding_window": None}),
    "OLMo 2": ("olmo2", {}),
    "Granite": ("granite", GRANITE),
    "SmolLM3, 5 blocks": ("smollm3", {"num_hidden_layers": 5}),
    "GLM-4": ("glm4", {}),
    "Seed-OSS": ("seed_oss", {}),
    "Ernie 4.5": ("ernie4_5", {}),
}
RULES = {"w4a16": {"group_size": 32, "layout": "row-major"}, "w8a8": {"layout": "row-major-8"}}


def random_model(kind: str, changes: dict[str, Any], out: Path) -> Path:
    """A saved model in float16 whose attention depends on positions."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **PLAIN | changes))
    low = -0.5 if kind.startswith("gemma") else 0.5  # Gemma adds one to norms' weights
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, low, low + 1)
        else:
            torch.nn.init.normal_(parameter, std=0.05)
    model.half().save_pretrained(out)
    return out


def compare(native: Path, ids: Tensor, directory: Path) -> tuple[float, ...]:
    """The figures of a row, for ``ids [tokens]``."""
    file = export(native, "gguf", directory / f"{native.name}.gguf").directory / FILE
    with torch.no_grad():
        ours = dequantized(qtool.load(native, dtype=torch.float32))(ids[None]).logits[0]
    theirs, plain = through(file, ids), through(in_float32(file), ids, FLOAT32)
    perplexity = (float(cross_entropy(found[:-1], ids[1:]).exp()) for found in (ours, theirs))
    far, apart = (float((found - ours).norm() / ours.norm()) for found in (theirs, plain))
    return *perplexity, far, float((theirs.argmax(1) == ours.argmax(1)).float().mean()), apart


def line(name: str, measured: list[tuple[float, ...]]) -> bool:
    """Print a row with the figures side by side; returns whether all are within the limit."""
    forms = "{:.2f}", "{:.2f}", "{:.1e}", "{:.1%}", "{:.0e}"
    columns = zip(forms, zip(*measured, strict=True), strict=True)
    cells = [" / ".join(map(form.format, figures)) for form, figures in columns]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return all(figures[-1] < LIMIT for figures in measured)


def through(file: Path, ids: Tensor, cache: int | None = None) -> Tensor:
    """llama.cpp's logits ``[tokens, words]``."""
    options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    model = Llama(str(file), logits_all=True, type_k=cache, type_v=cache, **options)
    model.eval(ids.tolist())
    return torch.from_numpy(model.scores[: len(ids)].copy())


def in_float32(file: Path) -> Path:
    """A copy of ``file`` in the same folder with float32 tensors."""
    reader, out = gguf.GGUFReader(file), file.with_suffix(".float32.gguf")
    fields = {name: field for name, field in reader.fields.items() if "GGUF." not in name}
    writer = gguf.GGUFWriter(out, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        kind, *element = field.types
        writer.add_key_value(name, field.contents(), kind, element[-1] if element else None)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def main() -> None:
    right, natives = [], [Path(argument) for argument in sys.argv[1:]]
    for native in natives:
        text = corpora.load("demo", split="test").text
        ids = qtool.load_tokenizer(native)(text, return_tensors="pt", verbose=False)["input_ids"]
        with tempfile.TemporaryDirectory() as directory:
            right.append(line(native.name, [compare(native, ids[0, :TOKENS], Path(directory))]))
    ids = torch.randint(3, 320, (TOKENS,), generator=torch.Generator().manual_seed(0))
    for name in CASES if not natives else ():
        with tempfile.TemporaryDirectory() as directory:
            source, measured = random_model(*CASES[name], Path(directory) / "source"), []
            for scheme, settings in RULES.items():
                rules = [{"match": ".*", "scheme": scheme, **settings}]
                recipe = recipes.parse({"scheme": "t", "layers": rules}, "t")
                native = quantize(Checkpoint(source), recipe, Path(directory) / scheme)
                measured.append(compare(native, ids, Path(directory)))
        right.append(line(name, measured))
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
