"""``qtool eval --engine vllm``: the windows and requests of an evaluation, scored by vLLM.

For perplexity vLLM gives the log-probability of every token of the windows (``prompt_logprobs``);
for zero-shot tasks lm-eval's own class calls vLLM. The model runs as vLLM serves it by default,
with torch.compile, CUDA graphs and its own cache, on any number of GPUs.
"""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from qtool.eval.engine import Engine
from qtool.models import Heads
from qtool.models.architecture import context_length
from qtool.models.auto import config_of
from qtool.serving.vllm.engine import (
    EVALUATED,
    FIXED_CACHE,
    answers,
    engine,
    greedy,
    installed,
    prompt_scores,
)

#: prompt tokens per step, each with the float32 logits of the whole vocabulary
STEP_TOKENS = 2048
#: windows whose keys and values, in float32, fit the cache; a window is freed once it is read
CACHED_WINDOWS = 8


def cache_bytes(config: Any, tokens: int) -> int:
    """A size of the KV cache for :data:`CACHED_WINDOWS` of ``tokens``, a GiB at least.

    ``config`` is transformers'; the layers of a model may differ, or have no attention.
    """
    settings = SimpleNamespace(**config.to_dict())
    if not getattr(settings, "num_attention_heads", None):
        return 1 << 30
    heads = Heads.of(settings)
    token = 2 * settings.num_hidden_layers * heads.kv * heads.dim * 4
    return max(1 << 30, CACHED_WINDOWS * tokens * token)


class VllmModel(Engine):
    """The model of a directory, native or not, in vLLM.

    Args:
        tokens: number of tokens of the longest window; None for requests of any length, which need
            the tokenizer too. The engine has room for one token more, since it always generates
            one.
        dtype: name of the model's dtype; by default the checkpoint's own.

    Raises:
        QtoolError: as :func:`qtool.serving.vllm.engine.engine`.
    """

    batch_size = 256

    def __init__(
        self, directory: Path, *, tokens: int | None, dtype: str | None, tensor_parallel: int
    ) -> None:
        self.directory = directory
        text = config_of(directory).get_text_config()
        self.vocabulary = text.vocab_size
        self.context_length = context_length(text)
        lengths = [length for length in (tokens, self.context_length) if length is not None]
        room: dict[str, Any] = {"max_model_len": min(lengths) + 1} if lengths else {}
        if tokens is None:
            room |= {"skip_tokenizer_init": False, "gpu_memory_utilization": 0.85}
        else:
            room |= FIXED_CACHE | {"kv_cache_memory_bytes": cache_bytes(text, min(lengths) + 1)}
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # for that token
        self.llm = engine(
            directory,
            in_process=False,
            dtype=dtype or "auto",
            tensor_parallel_size=tensor_parallel,
            max_num_batched_tokens=STEP_TOKENS,
            **EVALUATED,
            **room,
        )

    @classmethod
    def version(cls) -> str:
        return f"vllm {installed()}"

    def nll(self, windows: Tensor) -> list[float]:
        found = answers(self.llm, windows.tolist(), greedy(1, prompt_scores=True))
        return [-math.fsum(prompt_scores(answer)) for answer in found]

    def lm_eval_model(self) -> Any:
        from lm_eval.models import vllm_causallms

        from qtool.eval.language_model import MergedPairs

        class LanguageModel(MergedPairs, vllm_causallms.VLLM):
            """lm-eval's own class of vLLM's models."""

        with patch.object(vllm_causallms, "LLM", lambda **_: self.llm):
            # a number: with "auto" vLLM shows bars of its own
            return LanguageModel(pretrained=str(self.directory), batch_size=1 << 16)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
