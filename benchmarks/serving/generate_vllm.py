"""Exports through vLLM's kernels on a GPU: greedy tokens and log-probabilities beside our own runtime's.

    python benchmarks/serving/generate_vllm.py NATIVE EXPORT [EXPORT ...] [--text FILE] [--dtype float16]

Each export is served in a process of its own. The same token ids go to both sides: windows of ``--text``, or random ids
for a model without a tokenizer. A line for each export: the kernel that ran; how many greedy continuations are equal,
and by how much our two best logits differ where the others part; the mean log-probability of the prompts on both
sides, and the mean and largest distance of a token's. First the same distance of our runtime from itself in float32,
which no other kernel can be expected to be under. An export whose activations have 16 bits where the
checkpoint's are quantized is held against our dequantized weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from through_vllm import kernel_of

SEED = 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def ours(native: Path, prompts: list[list[int]], tokens: int, dtype: str, sixteen: bool) -> dict[str, Any]:
    """Continuations ``[P, T]``, the gap of the two best logits at each token, log-probabilities of the prompts."""
    from qtool.runtime.huggingface import dequantized
    from qtool.runtime.load import load

    model: Any = load(native, device=DEVICE, dtype=getattr(torch, dtype))
    if sixteen:
        model = dequantized(model)
    ids = torch.tensor(prompts, device=DEVICE)
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([step.float().topk(2).values for step in whole.logits], 1)  # [P, T, 2]
    return {
        "tokens": whole.sequences[:, ids.shape[1] :].tolist(),
        "gaps": (best[..., 0] - best[..., 1]).tolist(),
        "scores": scores_of(model, ids).tolist(),
    }


def scores_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities ``[P, S - 1]`` of the tokens of ``ids [P, S]`` after the first."""
    return model(ids).logits.float().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)


@torch.no_grad()
def from_itself(native: Path, prompts: list[list[int]], dtype: str) -> str:
    """How far our own log-probabilities in ``dtype`` are from those in float32."""
    from qtool.runtime.load import load

    ids = torch.tensor(prompts, device=DEVICE)
    found, exact = (
        scores_of(load(native, device=DEVICE, dtype=d), ids) for d in (getattr(torch, dtype), torch.float32)
    )
    distance = (found - exact).abs()
    return (
        f"{native.name}: {dtype} from float32, both ours: distance {distance.mean():.5f}, at most {distance.max():.4f}"
    )


def serve(export: str, request: Path) -> None:
    """In a process with vLLM: answer ``request`` (prompts, tokens, dtype) as JSON, last line of the output."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    wanted = json.loads(request.read_text())
    length = len(wanted["prompts"][0]) + wanted["tokens"] + 1
    model = LLM(
        export,
        dtype=wanted["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=length,
        kv_cache_memory_bytes=1 << 30,
        attention_backend=os.environ.get("ATTENTION", "TRITON_ATTN"),
        disable_log_stats=True,
        gpu_memory_utilization=0.02,  # asked for at the start only: the cache's size is given
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=wanted["tokens"], ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    answers = model.generate([{"prompt_token_ids": ids} for ids in wanted["prompts"]], greedy, use_tqdm=False)
    scores = [
        [at[token].logprob for at, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
        for answer, ids in zip(answers, wanted["prompts"], strict=True)
    ]
    kernels = model.apply_model(kernels_of)[0]
    print(json.dumps({"tokens": [list(a.outputs[0].token_ids) for a in answers], "scores": scores, "kernels": kernels}))


def kernels_of(model: torch.nn.Module) -> list[str]:
    """What multiplies in each quantized module."""
    ends = ("weight_packed", "qweight", "weight_scale", "scales")
    modules = (m for m in model.modules() if any(n.endswith(ends) for n, _ in m.named_parameters(recurse=False)))
    return sorted({kernel_of(module) for module in modules})


def activation_bits(directory: Path) -> int:
    """Of an export's quantized linears."""
    quantization = json.loads((directory / "config.json").read_text())["quantization_config"]
    groups = quantization.get("config_groups", {}).values()
    return min((g["input_activations"]["num_bits"] for g in groups if g.get("input_activations")), default=16)


def own_activation_bits(native: Path) -> int:
    """Of a native checkpoint's quantized linears."""
    from qtool.checkpoint.source import Checkpoint
    from qtool.pipeline.job import native_format
    from qtool.pipeline.verify import packed_linears

    checkpoint = Checkpoint(native)
    formats = (native_format(checkpoint.config).of(name) for name in packed_linears(checkpoint))
    return min(found.scheme_object.activation.bits for found in formats if found)


def compare(export: Path, request: Path, mine: dict[str, Any]) -> str:
    """Serve one export; its line."""
    command = [sys.executable, __file__, "--serve", str(export), str(request)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"{export.name}: vLLM stopped\n{done.stdout[-1500:]}{done.stderr[-3500:]}"
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    gaps = []
    for a, b, gap in zip(mine["tokens"], theirs["tokens"], mine["gaps"], strict=True):
        gaps += [next(g for x, y, g in zip(a, b, gap, strict=True) if x != y)] if a != b else []
    equal, all_of = len(mine["tokens"]) - len(gaps), len(mine["tokens"])
    parted = f", the others part where our best two logits differ by {min(gaps):.4f} to {max(gaps):.4f}" if gaps else ""
    x, y = torch.tensor(mine["scores"]), torch.tensor(theirs["scores"])
    distance = (x - y).abs()
    scores = f"{x.mean():.5f} ours, {y.mean():.5f} vLLM's, distance {distance.mean():.5f}, at most {distance.max():.4f}"
    kernels = ", ".join(theirs["kernels"])
    return f"{export.name}: {kernels}; {equal} of {all_of} continuations equal{parted}; log-probability {scores}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("native", type=Path)
    parser.add_argument("exports", type=Path, nargs="*", help="none: only our own distance, without a GPU too")
    parser.add_argument("--text", type=Path, help="prompts are its windows; without it they are random ids")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--at-once", type=int, default=4, help="exports served side by side")
    options = parser.parse_args()
    count, length = options.prompts, options.prompt_tokens
    if options.text:
        from qtool.runtime.load import load_tokenizer

        read = load_tokenizer(options.native)(options.text.read_text())["input_ids"][: count * length]
        prompts = torch.tensor(read).view(count, length).tolist()
    else:
        vocabulary = json.loads((options.native / "config.json").read_text())["vocab_size"]
        random = torch.Generator().manual_seed(SEED)
        prompts = torch.randint(3, vocabulary, (count, length), generator=random).tolist()

    print(from_itself(options.native, prompts, options.dtype), flush=True)
    own_bits = own_activation_bits(options.native)
    sides = {  # the checkpoint as it is, and with 16-bit activations
        sixteen: ours(options.native, prompts, options.tokens, options.dtype, sixteen)
        for sixteen in {activation_bits(e) == 16 and own_bits < 16 for e in options.exports}
    }
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder, "request.json")
        request.write_text(json.dumps({"prompts": prompts, "tokens": options.tokens, "dtype": options.dtype}))

        def line(export: Path) -> str:
            return compare(export, request, sides[activation_bits(export) == 16 and own_bits < 16])

        with ThreadPoolExecutor(options.at_once) as pool:
            for answer in pool.map(line, options.exports):
                print(answer, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
