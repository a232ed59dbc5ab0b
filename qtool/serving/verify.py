"""``qtool verify --engine vllm``: a native checkpoint in vLLM, compared with our own runtime.

Each multiplication of a layer that vLLM built from packed linears gives a row with its kernel and
the distance of its output from our runtime's on the same tokens. Further rows check the kernels
that vLLM's steps launch (:mod:`qtool.serving.replay`), the perplexity of prompts, and greedy
continuations.

Two correct stacks differ as much as one stack differs from itself under other roundings. So our
runtime also scores the prompts in float32: its largest distance from these scores is the *noise*.
Continuations may diverge only where the two best logits are within twice the noise, and
log-perplexities by no more than four standard errors of the noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.format import CheckpointFormat, native_format
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.auto import text_model
from qtool.pipeline.verify import Verified, relative_distance
from qtool.runtime.read_linear import load_linear
from qtool.serving.kernel import Gemm
from qtool.serving.replay import profiled, read_profiles, replays
from qtool.serving.vllm.engine import (
    EVALUATED,
    FIXED_CACHE,
    answers,
    engine,
    greedy,
    prompt_scores,
    require_vllm,
)

TOKENS = 8
#: decode steps that are profiled after a prefill
DECODED = 4
#: tolerance for kernels that sum floats: another tile adds in another order, and 16 bits round it
TOLERANCE = 4e-3
#: difference of mean log-probabilities of tokens that is always taken as equal
EQUAL = 1e-3


@dataclass(frozen=True)
class Answer:
    """A model's scores and continuations of prompts ``[P, S]``.

    Attributes:
        scores: log-probabilities ``[P, S - 1]`` of the prompts' tokens after the first.
        tokens: greedy continuations ``[P, T]``.
        gaps: differences of the two best logits, shaped as ``tokens``.
        noise: ``[P, S - 1]``, differences of ``scores`` from those in float32.
    """

    scores: Tensor
    tokens: list[list[int]]
    gaps: list[list[float]]
    noise: Tensor


def verify_in_vllm(
    directory: Path,
    *,
    prompts: list[list[int]] | None = None,
    tokens: int = 32,
    compiled: bool = True,
    tensor_parallel: int = 1,
) -> Iterator[Verified]:
    """Check that vLLM runs the native checkpoint in ``directory`` as our runtime does.

    Args:
        prompts: token ids, all of one length; 8 of 64 random ids by default.
        tokens: number of tokens to generate for each prompt.
        compiled: run vLLM with torch.compile and CUDA graphs, its default; else eagerly.
        tensor_parallel: GPUs that vLLM splits the model over. A rank's share of a layer has no
            counterpart in our runtime, so with more than one GPU only kernels and answers are
            compared.

    Raises:
        QtoolError: if the checkpoint or vLLM cannot be loaded.
    """
    require_vllm(directory, tensor_parallel)
    checkpoint = Checkpoint(directory)
    native_format(checkpoint.config)
    settings = family_of(checkpoint.config).settings(checkpoint.config)
    prompts = prompts or random_prompts(int(settings.vocab_size))
    ours = our_answer(directory, prompts, tokens)
    with TemporaryDirectory(prefix="qtool-") as folder:
        llm = engine(
            directory,
            max_model_len=len(prompts[0]) + tokens + 1,
            max_num_seqs=len(prompts),
            enforce_eager=not compiled,
            kv_cache_memory_bytes=1 << 30,
            tensor_parallel_size=tensor_parallel,
            **EVALUATED,
            **FIXED_CACHE,
            **profiled(Path(folder)),
        )
        each = llm.apply_model(multiplications)
        if not all(each):
            raise QtoolError(f"{directory}: vLLM built no layer from packed linears")
        if tensor_parallel == 1:
            yield from llm.apply_model(lambda model: list(layers(model, checkpoint)))[0]
        llm.start_profile()
        answers(llm, prompts[:4], greedy(DECODED + 1))
        llm.stop_profile()
        yield from replays(read_profiles(Path(folder)), each, DECODED, graphs=compiled)
    found = answers(llm, prompts, greedy(tokens, prompt_scores=True))
    yield perplexity(torch.tensor([prompt_scores(answer) for answer in found]), ours)
    yield continuations([list(answer.outputs[0].token_ids) for answer in found], ours)


def layers(model: nn.Module, checkpoint: Checkpoint) -> Iterator[Verified]:
    """One row for each multiplication by packed linears in vLLM's ``model``."""
    checkpoint_format = native_format(checkpoint.config)
    yield from (_row(gemm, checkpoint, checkpoint_format) for gemm in packed_gemms(model))


def multiplications(model: nn.Module) -> int:
    """The number of packed GEMMs in a step of vLLM's ``model``, on this rank."""
    return sum(gemm.launches for gemm in packed_gemms(model))


def packed_gemms(model: nn.Module) -> list[Gemm]:
    """The multiplications of all layers that vLLM built from packed linears."""
    owners = [m for m in model.modules() if hasattr(getattr(m, "quant_method", None), "gemms")]
    return [gemm for owner in owners for gemm in cast(Any, owner.quant_method).gemms(owner)]


@torch.no_grad()
def _row(gemm: Gemm, checkpoint: Checkpoint, checkpoint_format: CheckpointFormat) -> Verified:
    """The row that compares vLLM's layer with our linears of the checkpoint, on the same tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random, size = torch.Generator().manual_seed(0), (TOKENS, gemm.k)
    x = torch.randn(size, generator=random, dtype=torch.float32, device="cpu")
    x = x.to(device, gemm.dtype)
    parts, equal = [], gemm.kernel.exact  # integer sums are equal, whichever tile adds them
    for name in gemm.names:
        linear_format = checkpoint_format.of(name)
        assert linear_format is not None
        linear = load_linear(checkpoint, name, linear_format, device)
        kernel = linear.kernel(device, x.dtype)
        equal = equal and kernel in (gemm.kernel, None)  # None: the scheme's reference
        y = linear(x) if kernel is None else linear.multiply(x, kernel, x.dtype)
        parts.append(y[:, _rows(checkpoint, name)])
    distance = relative_distance(gemm.multiply(x), torch.cat(parts, -1).double())
    fits = distance <= (0.0 if equal else TOLERANCE)
    problem = "" if fits else f"differs from our runtime by {distance:.1e}"
    return Verified(gemm.name, problem, f"{gemm.kernel.name}, {gemm.kernel.precision}", distance)


def _rows(checkpoint: Checkpoint, name: str) -> slice | list[int]:
    """The rows of a linear in vLLM's order: query, key, value if the checkpoint goes by head."""
    family = family_of(checkpoint.config)
    _, within = family.place(name)
    if not family.fused_by_head or within not in family.fused:
        return slice(None)
    settings = family.settings(checkpoint.config)
    rows = [family.rows(part, settings) for part in family.fused[within]]
    turns = [part for part in rows if not isinstance(part, slice)]  # one kv head: there are none
    return [row for part in turns for row in part] or slice(None)


def perplexity(scores: Tensor, ours: Answer) -> Verified:
    """One row for the perplexity of all prompts together."""
    distance = float(abs((scores - ours.scores).mean()))
    limit = max(EQUAL, float(ours.noise.std() / ours.noise.numel() ** 0.5) * 4)
    theirs, mine = (float((-x.mean()).exp()) for x in (scores, ours.scores))
    problem = "" if distance <= limit else f"log-probabilities are {distance:.4f} apart"
    ran = f"{theirs:.4f} in vLLM, {mine:.4f} ours; log-probabilities may be {limit:.4f} apart"
    return Verified("perplexity of the prompts", problem, ran, distance)


def continuations(tokens: list[list[int]], ours: Answer) -> Verified:
    """One row for the greedy tokens ``[P, T]`` after all prompts."""
    noise, equal, sure = float(ours.noise.abs().max()), 0, []
    for row, (theirs, mine, gaps) in enumerate(zip(tokens, ours.tokens, ours.gaps, strict=True)):
        pairs = enumerate(zip(mine, theirs, strict=True))
        parted = next((at for at, (a, b) in pairs if a != b), None)
        equal += parted is None
        if parted is not None and gaps[parted] > 2 * noise:
            sure.append(f"prompt {row} at token {parted}, by {gaps[parted]:.3f}")
    problem = f"diverge by more than twice the noise: {', '.join(sure)}" if sure else ""
    ran = f"{equal} of {len(tokens)} continuations equal; noise {noise:.4f}"
    return Verified("greedy tokens", problem, ran)


@torch.no_grad()
def our_answer(directory: Path, prompts: list[list[int]], tokens: int) -> Answer:
    """The answer of :func:`qtool.runtime.load.load`'s model to prompts of one length."""
    from qtool.runtime.load import load

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.tensor(prompts, device=device)
    model: Any = text_model(load(directory, device=device))
    continued, gaps = greedy_continuations(model, ids, tokens)
    scores = _our_scores(model, ids)
    del model
    float_model = load(directory, device=device, dtype=torch.float32)
    exact = _our_scores(text_model(float_model), ids)
    if device == "cuda":
        torch.cuda.empty_cache()
    return Answer(scores, continued, gaps, scores - exact)


def greedy_continuations(
    model: Any, ids: Tensor, tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy continuations ``[P, T]`` of ``ids [P, S]`` by transformers' ``generate``.

    The second result is, for each token, the difference of the two best logits.
    """
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
    gaps = best[..., 0] - best[..., 1]
    return whole.sequences[:, ids.shape[1] :].tolist(), gaps.tolist()


def _our_scores(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities ``[P, S - 1]`` of tokens after the first, one prompt after another."""
    rows = [model(row[None]).logits.float().log_softmax(-1)[0, :-1] for row in ids]
    return torch.stack(rows).gather(2, ids[:, 1:, None])[..., 0].cpu()


def random_prompts(vocabulary: int) -> list[list[int]]:
    """Eight prompts of 64 random token ids."""
    return torch.randint(
        3, vocabulary, (8, 64), generator=torch.Generator().manual_seed(0)
    ).tolist()
