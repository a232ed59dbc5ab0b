"""Exports through vLLM's kernels on a GPU: greedy tokens and log-probabilities beside our own
runtime's.

    python benchmarks/serving/generate_vllm.py NATIVE EXPORT [EXPORT ...] [--text FILE] [--dtype
    float16] [--again]

Each export is served in a process of its own. Both sides get the same token ids: windows of
``--text``, or random ids for a model without a tokenizer. The first line has the distance of
qtool's runtime from itself in float32, below which no other kernel can be expected. Then there is a
line for each export with the kernel that ran; the number of equal greedy continuations, and by how
much our two best logits differ at the point at which the others part; the mean log-probability of
the prompts, ours and vLLM's; and the mean and largest distance of a token's log-probability. With
``--again`` each side also answers the prompts one by one instead of all at once, and vLLM also runs
compiled with CUDA graphs (its default) instead of eagerly. This gives the distance of a stack from
itself, below which two stacks cannot be expected either. If an export has 16-bit activations where
the checkpoint's are quantized, it is compared with our dequantized weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from through_vllm import kernel_of

SEED = 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def ours(
    native: Path, prompts: list[list[int]], tokens: int, dtype: str, sixteen: bool, again: bool
) -> list[dict[str, Any]]:
    """The results of :func:`answer` for all prompts at once and, with ``again``, one by one."""
    from qtool.runtime.huggingface import dequantized
    from qtool.runtime.load import load

    model: Any = load(native, device=DEVICE, dtype=getattr(torch, dtype))
    if sixteen:
        model = dequantized(model)
    ids = torch.tensor(prompts, device=DEVICE)
    found = [answer(model, ids, tokens)]
    if again:
        each = [answer(model, row[None], tokens) for row in ids]
        found.append({part: [row for one in each for row in one[part]] for part in each[0]})
    return found


def answer(model: Any, ids: torch.Tensor, tokens: int) -> dict[str, Any]:
    """Continuations ``[P, T]``, the gap of the two best logits at each token, log-probabilities of
    the prompts.
    """
    from qtool.serving.verify import greedy_continuations

    continued, gaps = greedy_continuations(model, ids, tokens)
    return {"tokens": continued, "gaps": gaps, "scores": scores_of(model, ids).tolist()}


def scores_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities ``[P, S - 1]`` of the tokens of ``ids [P, S]`` after the first."""
    return model(ids).logits.float().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)


@torch.no_grad()
def from_itself(native: Path, prompts: list[list[int]], dtype: str) -> str:
    """The distance of our own log-probabilities in ``dtype`` from those in float32."""
    from qtool.runtime.load import load

    ids = torch.tensor(prompts, device=DEVICE)
    found, exact = (
        scores_of(load(native, device=DEVICE, dtype=d), ids)
        for d in (getattr(torch, dtype), torch.float32)
    )
    distance = (found - exact).abs()
    return (
        f"{native.name}: {dtype} from float32, both ours: distance {distance.mean():.5f}, at "
        f"most {distance.max():.4f}"
    )


def serve(export: str, request: Path, compiled: bool) -> None:
    """In a process with vLLM: answer ``request`` (prompts, tokens, dtype, again) as JSON, last line
    of the output.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    wanted = json.loads(request.read_text())
    length = len(wanted["prompts"][0]) + wanted["tokens"] + 1
    model = LLM(
        export,
        dtype=wanted["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=not compiled,
        max_model_len=length,
        max_num_seqs=len(wanted["prompts"]),
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,  # a repeated prompt is computed again
        attention_backend=os.environ.get("ATTENTION", "TRITON_ATTN"),
        disable_log_stats=True,
        gpu_memory_utilization=0.02,  # only checked at the start: the cache's size is given
    )
    greedy = SamplingParams(
        temperature=0.0,
        max_tokens=wanted["tokens"],
        ignore_eos=True,
        prompt_logprobs=0,
        logprobs=2,
        detokenize=False,
    )

    def answers(prompts: list[list[int]]) -> list[Any]:
        return model.generate(
            [{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False
        )

    found = [read(answers(wanted["prompts"]))]
    if wanted["again"] and not compiled:
        found.append(read([one for ids in wanted["prompts"] for one in answers([ids])]))
    print(json.dumps({"answers": found, "kernels": model.apply_model(kernels_of)[0]}))


def read(answers: list[Any]) -> dict[str, Any]:
    """vLLM's answers in the form of :func:`answer`."""
    best = [
        [sorted((e.logprob for e in at.values()), reverse=True) for at in a.outputs[0].logprobs]
        for a in answers
    ]
    return {
        "tokens": [list(a.outputs[0].token_ids) for a in answers],
        "gaps": [[at[0] - at[1] for at in row] for row in best],
        "scores": [
            [
                at[token].logprob
                for at, token in zip(a.prompt_logprobs[1:], a.prompt_token_ids[1:], strict=True)
            ]
            for a in answers
        ],
    }


def kernels_of(model: torch.nn.Module) -> list[str]:
    """The kernel of each quantized module."""
    ends = ("weight_packed", "qweight", "weight_scale", "scales")
    modules = (
        m
        for m in model.modules()
        if any(n.endswith(ends) for n, _ in m.named_parameters(recurse=False))
    )
    return sorted({kernel_of(module) for module in modules})


def activation_bits(directory: Path) -> int:
    """The bits of activations of an export's quantized linears."""
    quantization = json.loads((directory / "config.json").read_text())["quantization_config"]
    groups = quantization.get("config_groups", {}).values()
    return min(
        (g["input_activations"]["num_bits"] for g in groups if g.get("input_activations")),
        default=16,
    )


def own_activation_bits(native: Path) -> int:
    """The bits of activations of a native checkpoint's quantized linears."""
    from qtool.format import native_format
    from qtool.format.stored_linears import packed_names
    from qtool.io.source import Checkpoint

    checkpoint = Checkpoint(native)
    formats = (native_format(checkpoint.config).of(name) for name in packed_names(checkpoint))
    return min(found.scheme_object.activation.bits for found in formats if found)


def compare(export: Path, served: list[Future[Any]], mine: dict[str, Any]) -> str:
    """The line of one export, and the lines that compare vLLM with itself."""
    try:
        found = [process.result() for process in served]
    except RuntimeError as error:
        return f"{export.name}: vLLM stopped\n{error}"
    theirs, *others = [one for process in found for one in process["answers"]]
    lines = [f"{export.name}: {', '.join(found[0]['kernels'])}; {beside(mine, theirs)}"]
    for way, other in zip(("one prompt after another", "compiled"), others, strict=False):
        lines.append(f"    vLLM beside itself, {way}: {beside(theirs, other)}")
    return "\n".join(lines)


def ask(export: Path, request: Path, compiled: bool) -> Any:
    """The answer of a process with vLLM."""
    command = [
        sys.executable,
        __file__,
        "--serve",
        str(export),
        str(request),
        *["compiled"] * compiled,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-3500:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def beside(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The differences of two answers to the same prompts; gaps of logits are from the first."""
    gaps = []
    for a, b, gap in zip(first["tokens"], second["tokens"], first["gaps"], strict=True):
        gaps += [next(g for x, y, g in zip(a, b, gap, strict=True) if x != y)] if a != b else []
    count = len(first["tokens"])
    parted = (
        f", the others part where the best two logits differ by {min(gaps):.4f} to {max(gaps):.4f}"
        if gaps
        else ""
    )
    x, y = torch.tensor(first["scores"]), torch.tensor(second["scores"])
    distance = (x - y).abs()
    scores = (
        f"{x.mean():.5f} and {y.mean():.5f}, distance {distance.mean():.5f}, at most "
        f"{distance.max():.4f}"
    )
    return f"{count - len(gaps)} of {count} continuations equal{parted}; log-probability {scores}"


def main() -> None:
    """Print how our runtime and vLLM, in other processes, differ on the same prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("native", type=Path)
    parser.add_argument(
        "exports", type=Path, nargs="*", help="none: only our own distance, without a GPU too"
    )
    parser.add_argument(
        "--text", type=Path, help="prompts are its windows; without it they are random ids"
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--at-once", type=int, default=4, help="processes with vLLM")
    parser.add_argument("--again", action="store_true", help="each side beside itself too")
    options = parser.parse_args()
    count, length = options.prompts, options.prompt_tokens
    if options.text:
        from qtool.runtime.load import load_tokenizer

        read = load_tokenizer(options.native)(options.text.read_text())["input_ids"][
            : count * length
        ]
        prompts = torch.tensor(read).view(count, length).tolist()
    else:
        vocabulary = json.loads((options.native / "config.json").read_text())["vocab_size"]
        random = torch.Generator().manual_seed(SEED)
        prompts = torch.randint(3, vocabulary, (count, length), generator=random).tolist()

    own_bits = own_activation_bits(options.native)
    sixteen = {
        export: activation_bits(export) == 16 and own_bits < 16 for export in options.exports
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        request = Path(folder, "request.json")
        wanted = {
            "prompts": prompts,
            "tokens": options.tokens,
            "dtype": options.dtype,
            "again": options.again,
        }
        request.write_text(json.dumps(wanted))
        ways = (False, True) if options.again else (False,)
        served = {
            e: [pool.submit(ask, e, request, compiled) for compiled in ways]
            for e in options.exports
        }
        print(from_itself(options.native, prompts, options.dtype), flush=True)
        sides = {}
        for plain in set(sixteen.values()):
            found = ours(
                options.native, prompts, options.tokens, options.dtype, plain, options.again
            )
            sides[plain] = found[0]
            if options.again:
                name = f"{options.native.name}{', dequantized' if plain else ''}"
                print(
                    f"{name}: ours beside itself, one prompt after another: {beside(*found)}",
                    flush=True,
                )
        for export in options.exports:
            print(compare(export, served[export], sides[sixteen[export]]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), sys.argv[4:] == ["compiled"])
    else:
        main()
