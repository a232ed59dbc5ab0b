"""``qtool verify --engine vllm``: what vLLM runs for a native checkpoint, held against our own runtime.

For each layer that vLLM built from packed linears: the kernel that multiplies, and the distance of
its output from our runtime's on the same tokens. Then greedy continuations: wherever they part, the
two best logits must be closer together than vLLM's are to themselves when it is asked for one
prompt after another.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.pipeline.job import native_format
from qtool.pipeline.verify import Verified, load_linear
from qtool.serving.kernel import Gemm

TOKENS = 8
#: of layers whose kernel sums floats: another tile adds in another order, and 16 bits round it
TOLERANCE = 4e-3
#: closest that vLLM's logits are taken to be to themselves: half a step of bfloat16 at 8
LEAST_NOISE = 0.03


@dataclass(frozen=True)
class Continuations:
    """Greedy tokens ``[P, T]`` of prompts, and how far apart the two best logits were at each."""

    tokens: list[list[int]]
    gaps: list[list[float]]


def verify_in_vllm(
    directory: Path,
    *,
    prompts: list[list[int]] | None = None,
    tokens: int = 32,
    compiled: bool = True,
    **options: Any,
) -> Iterator[Verified]:
    """Check what vLLM makes of the native checkpoint in ``directory``.

    Args:
        prompts: token ids, all of one length; 8 of 64 random ids by default. tokens: generated for
            each.
        compiled: as vLLM serves by default, with torch.compile and CUDA graphs; else eagerly.
        options: of ``vllm.LLM``.

    Raises:
        QtoolError: if the checkpoint or vLLM cannot be loaded.
    """
    from qtool.serving.vllm.engine import engine

    checkpoint = Checkpoint(directory)
    native_format(checkpoint.config)
    prompts = prompts or random_prompts(int(checkpoint.config["vocab_size"]))
    ours = our_continuations(directory, prompts, tokens)
    settings = {
        "max_model_len": len(prompts[0]) + tokens + 1,
        "gpu_memory_utilization": 0.5,
    } | options
    llm = engine(directory, enforce_eager=not compiled, max_num_seqs=len(prompts), **settings)
    if (
        settings.get("tensor_parallel_size", 1) == 1
    ):  # a rank's layers have no counterpart in our runtime
        yield from llm.apply_model(lambda model: list(layers(model, checkpoint)))[0]
    yield continuations(llm, prompts, ours)


def layers(model: nn.Module, checkpoint: Checkpoint) -> Iterator[Verified]:
    """One row for each multiplication by packed linears in vLLM's ``model``."""
    owners = [m for m in model.modules() if hasattr(getattr(m, "quant_method", None), "gemms")]
    gemms: list[Gemm] = [gemm for owner in owners for gemm in owner.quant_method.gemms(owner)]  # type: ignore
    if not gemms:
        raise QtoolError(f"{checkpoint.directory}: vLLM built no layer from packed linears")
    yield from (_row(gemm, checkpoint) for gemm in gemms)


@torch.no_grad()
def _row(gemm: Gemm, checkpoint: Checkpoint) -> Verified:
    """What vLLM's layer gives beside our linears of the checkpoint, on the same tokens."""
    checkpoint_format = native_format(checkpoint.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(
        TOKENS,
        gemm.k,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float32,
        device="cpu",
    )
    x = x.to(device, gemm.dtype)
    parts, same = [], gemm.kernel.exact
    for name in gemm.names:
        linear_format = checkpoint_format.of(name)
        assert linear_format is not None
        linear = load_linear(checkpoint, name, linear_format, device)
        kernel = linear.kernel(device, x.dtype)
        same = same and kernel in (gemm.kernel, None)
        parts.append(linear(x) if kernel is None else linear.multiply(x, kernel, x.dtype))
    expected = torch.cat(parts, -1).float()
    distance = float(
        (gemm.multiply(x).float() - expected).norm() / expected.norm().clamp(min=1e-30)
    )
    problem = (
        ""
        if distance <= (0.0 if same else TOLERANCE)
        else f"differs from our runtime by {distance:.1e}"
    )
    return Verified(gemm.name, problem, f"{gemm.kernel.name}, {gemm.kernel.precision}", distance)


def continuations(llm: Any, prompts: list[list[int]], ours: Continuations) -> Verified:
    """One row for the greedy tokens of all prompts."""
    from qtool.serving.vllm.engine import answers, greedy

    sampling = greedy(len(ours.tokens[0]), prompt_scores=True)
    together = answers(llm, prompts, sampling)
    apart = [one for prompt in prompts for one in answers(llm, [prompt], sampling)]
    distance = (_scores(together) - _scores(apart)).abs().max()
    noise = max(float(distance), LEAST_NOISE)
    equal, sure = 0, []
    for row, (mine, gaps, answer) in enumerate(zip(ours.tokens, ours.gaps, together, strict=True)):
        theirs = list(answer.outputs[0].token_ids)
        parted = next(
            (at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None
        )
        equal += parted is None
        if parted is not None and gaps[parted] > noise:
            sure.append(
                f"prompt {row}, token {parted} (the two best logits {gaps[parted]:.3f} apart)"
            )
    ran = f"{equal} of {len(prompts)} continuations equal, vLLM from itself {float(distance):.4f}"
    return Verified(
        "greedy tokens",
        f"part from our runtime's where it is sure: {', '.join(sure)}" if sure else "",
        ran,
    )


def _scores(found: list[Any]) -> Tensor:
    """Log-probabilities ``[P, S - 1]`` of the prompts' tokens after the first."""
    return torch.tensor(
        [
            [
                at[t].logprob
                for at, t in zip(a.prompt_logprobs[1:], a.prompt_token_ids[1:], strict=True)
            ]
            for a in found
        ]
    )


@torch.no_grad()
def our_continuations(directory: Path, prompts: list[list[int]], tokens: int) -> Continuations:
    """Greedy continuations by :func:`qtool.runtime.load.load`."""
    from qtool.runtime.load import load

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = load(directory, device=device)
    ids = torch.tensor(prompts, device=device)
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
    found = Continuations(
        whole.sequences[:, ids.shape[1] :].tolist(), (best[..., 0] - best[..., 1]).tolist()
    )
    del model, whole
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def random_prompts(vocabulary: int, count: int = 8, length: int = 64) -> list[list[int]]:
    """Prompts of random token ids."""
    return torch.randint(
        3, vocabulary, (count, length), generator=torch.Generator().manual_seed(0)
    ).tolist()
