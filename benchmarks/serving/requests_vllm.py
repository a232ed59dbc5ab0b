"""Random requests through vLLM, all at once and one at a time: the same tokens, no block lost.

    python benchmarks/serving/requests_vllm.py DIR [--requests 200] [--longest 8000]
    [--blocks 400] [--tokens 16] [--alone 50]

Lengths are log-uniform from 1 to ``--longest``; a third of the prompts begin like another one. The
cache has ``--blocks`` blocks, few enough that requests are preempted; prompts are processed in
chunks of ``--chunk``, and prefixes are cached. At once and alone, a prompt's chunks differ, and so
the tokens that attention reads from the quantized cache; GEMMs also sum in other orders. So
continuations may part if the two best tokens are nearly equally likely: closer than ``--unsure`` in
log-probability.
"""

import argparse
import random
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qtool.serving.vllm.engine import FIXED_CACHE, answers, engine


def prompts_of(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Random token ids, of which some share their beginning."""
    source = random.Random(0)
    prompts: list[list[int]] = []
    for _ in range(count):
        length = round(longest ** source.random())
        shared: list[int] = []
        if prompts and source.random() < 1 / 3:
            earlier = source.choice(prompts)
            shared = earlier[: source.randint(0, min(length, len(earlier)))]
        rest = [source.randrange(vocabulary) for _ in range(length - len(shared))]
        prompts.append(shared + rest)
    return prompts


def gaps(answer: Any) -> list[float]:
    """The gap of the two best tokens' log-probabilities at each step."""
    found = []
    for step in answer.outputs[0].logprobs:
        best = sorted((entry.logprob for entry in step.values()), reverse=True)
        found.append(best[0] - best[1])
    return found


def parted(together: Any, alone: Any) -> float | None:
    """The larger gap of both continuations at the step at which they part; None if they do not."""
    pairs = zip(together.outputs[0].token_ids, alone.outputs[0].token_ids, strict=True)
    for step, (one, other) in enumerate(pairs):
        if one != other:
            return max(gaps(together)[step], gaps(alone)[step])
    return None


def main() -> int:
    """Serve requests at once and some alone; 1 if they differ, lose blocks or never wait."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--alone", type=int, default=50, help="that are compared")
    parser.add_argument("--longest", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--unsure", type=float, default=0.5)
    options = parser.parse_args()
    if find_spec("vllm") is None:
        sys.exit("requests_vllm.py: vLLM is not installed; make test-serving installs it")
    llm = engine(
        options.directory,
        max_model_len=options.longest + options.tokens + 1,
        max_num_batched_tokens=options.chunk,
        max_num_seqs=64,
        enable_prefix_caching=True,
        num_gpu_blocks_override=options.blocks,
        kv_cache_memory_bytes=8 << 30,
        **FIXED_CACHE,
    )
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=options.tokens, ignore_eos=True, detokenize=False, logprobs=2
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free, preempt, preempted = pool.get_num_free_blocks(), scheduler._preempt_request, []

    def counted(request: Any, *more: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *more, **options)

    scheduler._preempt_request = counted
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = prompts_of(options.requests, options.longest, vocabulary)
    start = time.perf_counter()
    together = answers(llm, prompts, sampling)
    seconds, lost = time.perf_counter() - start, free - pool.get_num_free_blocks()
    total = sum(map(len, prompts))
    print(
        f"{len(prompts)} requests, {total} tokens in, {len(preempted)} preempted, "
        f"{sum(bool(a.num_cached_tokens) for a in together)} with a cached prefix, "
        f"{lost} blocks lost, {seconds:.1f} s",
        flush=True,
    )
    found = []
    for number in range(0, len(prompts), max(1, len(prompts) // options.alone)):
        llm.reset_prefix_cache()
        [alone] = answers(llm, [prompts[number]], sampling)
        found.append(parted(together[number], alone))
    where = [gap for gap in found if gap is not None]
    wrong = sum(gap > options.unsure for gap in where)
    steps = sorted(gap for answer in together for gap in gaps(answer))
    sure = sum(gap > options.unsure for gap in steps) / len(steps)
    print(
        f"RESULT {len(found)} alone: {len(found) - len(where)} the same, {len(where)} part where "
        f"the best two are within {max(where, default=0.0):.3f}, {wrong} wrong; {sure:.0%} of "
        f"steps are surer than {options.unsure}"
    )
    return int(wrong > 0 or lost != 0 or not preempted)


if __name__ == "__main__":
    sys.exit(main())
