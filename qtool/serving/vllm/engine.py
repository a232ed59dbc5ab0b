"""vLLM in this process: an ``LLM`` that is given token ids and greedily gives token ids back."""

import os
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError


def engine(directory: str | Path, **options: Any) -> Any:
    """vLLM's ``LLM`` of a model directory, in this process, without its tokenizer.

    Args:
        options: of ``vllm.LLM``; a directory of ours is recognized by its ``config.json``.

    Raises:
        QtoolError: if vLLM is not installed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the model can be asked
    try:
        from vllm import LLM
    except ImportError as error:
        raise QtoolError(f"vLLM is needed: pip install 'qtool[vllm]' ({error})") from error
    from qtool.serving.vllm.plugin import register

    register()
    fixed = {"skip_tokenizer_init": True, "disable_log_stats": True, "enable_prefix_caching": False}
    return LLM(str(directory), **(fixed | options))


def greedy(tokens: int, *, prompt_scores: bool = False) -> Any:
    """Sampling of exactly ``tokens`` greedy tokens; ``prompt_scores`` adds log-probabilities of
    prompt and tokens.
    """
    from vllm import SamplingParams

    scores = {"prompt_logprobs": 0, "logprobs": 2} if prompt_scores else {}
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **scores
    )


def answers(llm: Any, prompts: list[list[int]], sampling: Any) -> list[Any]:
    """vLLM's outputs for prompts of token ids, in their order."""
    return list(
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    )
