"""vLLM's ``LLM`` of a model directory: it takes token ids and returns ids and scores."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qtool.errors import QtoolError
from qtool.models.architecture import DTYPES
from qtool.serving.preflight import require_gpus, require_servable

NEEDED = "vLLM is needed: pip install 'qtool[vllm]'"
#: used with ``kv_cache_memory_bytes``: vLLM checks this share of the memory only when it starts
FIXED_CACHE: dict[str, Any] = {"gpu_memory_utilization": 0.02}

#: in ``additional_config``: a prefill reads its own keys and values from the quantized cache too
READ_BACK = "qtool_read_back"
#: options of an engine that scores prompts through the quantized cache, as an evaluation does
EVALUATED: dict[str, Any] = {"additional_config": {READ_BACK: True}}


def engine(directory: str | Path, *, in_process: bool = True, **options: Any) -> Any:
    """vLLM's ``LLM`` of a model directory, without its tokenizer and without its towers.

    Args:
        in_process: keep the model (of several ranks the first one's share) in this process, so that
            it can be inspected; else it is in a process of vLLM's, whose memory is freed when it
            ends.
        options: options of ``vllm.LLM``, which recognizes a native checkpoint by its
            ``config.json``.

    Raises:
        QtoolError: vLLM is not installed or too old, the GPUs are too few, the checkpoint cannot
            be served, or vLLM does not load it.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not in_process))
    # vLLM's processes are spawned: a forked one would wait for OpenMP threads that it does not have
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # ranks of vLLM open each other's memory, which expandable segments do not allow
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    dtype = DTYPES.get(options.get("dtype", "auto"))
    require_vllm(Path(directory), options.get("tensor_parallel_size", 1), dtype)
    from vllm import LLM

    fixed = {
        "skip_tokenizer_init": True,
        "language_model_only": True,  # nor is a multimodal model's processor needed
        "disable_log_stats": True,
        "enable_prefix_caching": False,
    }
    try:
        return LLM(str(directory), **(fixed | options))
    except (RuntimeError, ValueError, AssertionError) as error:  # a failed start, wrong options
        raise QtoolError(
            f"vLLM does not load {directory}: {_last_line(error)} (its messages above say more)"
        ) from error


def _last_line(error: Exception) -> str:
    """The last line of an error that says what is wrong; pydantic puts a link behind it."""
    lines = [x.strip() for x in str(error).splitlines() if "https://errors.pydantic.dev" not in x]
    return next((line for line in reversed(lines) if line), type(error).__name__)


def require_vllm(directory: Path, tensor_parallel: int, dtype: torch.dtype | None = None) -> None:
    """Refuse a model that cannot be served before anything is loaded, then register the plugin.

    The import of vLLM takes a minute, so checks that do not need it run first.

    Raises:
        QtoolError: vLLM is not installed or too old, or the GPUs are too few, or what
            :func:`qtool.serving.preflight.require_servable` refuses.
    """
    from qtool.serving.vllm.plugin import register

    installed()
    require_gpus(tensor_parallel)
    require_servable(directory, tensor_parallel, dtype=dtype)
    # stdout is for results; vLLM logs to stderr
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        register()
    except ImportError as error:
        raise QtoolError(f"{NEEDED} ({error})") from error
    from vllm.platforms import current_platform  # does not create a GPU context

    found = current_platform.get_device_capability()
    require_servable(directory, tensor_parallel, found and (found.major, found.minor), dtype)


def installed() -> str:
    """The installed version of vLLM, found without importing it.

    Raises:
        QtoolError: it is not installed.
    """
    try:
        return version("vllm")
    except PackageNotFoundError:
        raise QtoolError(NEEDED) from None


def greedy(tokens: int, *, prompt_scores: bool = False) -> Any:
    """Sampling of exactly ``tokens`` greedy tokens.

    ``prompt_scores`` adds log-probabilities of the prompt and of the tokens.
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


def prompt_scores(answer: Any) -> list[float]:
    """Log-probabilities of a prompt's tokens after the first."""
    pairs = zip(answer.prompt_logprobs[1:], answer.prompt_token_ids[1:], strict=True)
    return [at[token].logprob for at, token in pairs]
