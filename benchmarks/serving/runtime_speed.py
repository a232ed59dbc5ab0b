"""Speed of our own runtime: host time of a linear, decode steps with and without CUDA graphs.

    python benchmarks/serving/runtime_speed.py [--scheme w4a8-lqq] [--batches 1,16,64] [--out FILE]
    python benchmarks/serving/runtime_speed.py --tiny --device cpu

It makes a checkpoint of Llama-3-8B's shape (each linear is the quantization of one random weight of
its shape), loads it with ``qtool.load``, loads transformers' own bf16 model of the shape, and
measures:

    linear     microseconds of host time to start an eager linear of M tokens, not waiting for it
    step       milliseconds of a decode step of ``generate``, the difference of two lengths
    same       whether greedy tokens with and without graphs are equal, and eager ones over a
               dynamic cache up to which token
    distance   distance of a step's logits from those of one forward over the same tokens
    kernels    the kernels that a replayed step launches, by name

It prints a table and writes JSON. Each part has a time limit; a part that fails is reported and the
others go on.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from qtool.bench.stored import store
from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.models.cache_argument import CACHE
from qtool.runtime import decode, load, range_attention
from qtool.runtime.decode import DecodeGraphs, Step
from qtool.runtime.dispatch import KERNELS
from qtool.runtime.huggingface import quantized_linears
from qtool.schemes import SCHEMES

SHAPES = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    },
}
LAYERS_A_FILE = 8


def make(shape: str, scheme: str, out: Path, device: str) -> None:
    """Write a packed checkpoint of ``shape``: norms of ones, everything else random."""
    config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=False, dtype="bfloat16")
    layout = next(layout for name, layout in KERNELS if name == scheme)
    linear_format = LinearFormat(scheme, SCHEMES[scheme].default_group_size, layout)
    checkpoint_format = CheckpointFormat(scheme, (Rule(r"\.layers\.", linear_format),))
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    packed: dict[tuple[int, ...], dict[str, Tensor]] = {}
    files: dict[str, dict[str, Tensor]] = {}
    for name, spec in skeleton.state_dict().items():
        number = int(name.split(".")[2]) // LAYERS_A_FILE if ".layers." in name else "rest"
        tensors = files.setdefault(f"model-{number}.safetensors", {})
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(spec.shape, dtype=torch.bfloat16)
        elif ".layers." in name:
            key = tuple(spec.shape)
            if key not in packed:
                packed[key] = pack_random(linear_format, *key, device)
            owner = name.removesuffix(".weight")
            tensors |= {f"{owner}.{part}": t.clone() for part, t in packed[key].items()}
        else:
            values = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
            tensors[name] = values.normal_(std=0.02).cpu()
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    for file, tensors in files.items():
        save_file(tensors, out / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    settings["quantization_config"] = checkpoint_format.to_dict()
    (out / "config.json").write_text(json.dumps(settings))


def pack_random(linear_format: LinearFormat, n: int, k: int, device: str) -> dict[str, Tensor]:
    """The stored tensors of a random weight ``[n, k]``."""
    scheme, generator = linear_format.scheme_object, torch.Generator(device).manual_seed(n + k)
    weight = torch.empty(n, k, device=device).normal_(std=k**-0.5, generator=generator)
    params = scheme.fit(weight)
    stored = linear_format.pack(scheme.quantize(weight, params), params)
    return {name: tensor.cpu() for name, tensor in stored.items()}


class Run:
    """One run: its settings and its results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.scheme, self.shape = options.device, options.scheme, options.shape
        self.batches, self.prompt = options.batches, options.prompt
        self.short, self.long = options.tokens
        self.found: dict[str, Any] = {"scheme": self.scheme, "shape": self.shape}
        self.failed = 0

    @contextmanager
    def part(self, name: str, seconds: int) -> Iterator[None]:
        """Run the block for at most ``seconds`` and report its errors."""

        def late(*_: Any) -> None:
            raise TimeoutError(f"{name}: over {seconds} s")

        started = time.perf_counter()
        signal.signal(signal.SIGALRM, late)
        signal.alarm(seconds)
        try:
            yield
        except Exception as error:
            self.failed += 1
            self.found[f"{name} failed"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            signal.alarm(0)
        took = time.perf_counter() - started
        print(f"{name:24} {took:6.1f} s  {json.dumps(self.found.get(name, ''))}", flush=True)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def host_us(self, call: Callable[[], object]) -> float:
        """Median microseconds until a call returns."""
        calls, repeats = (100, 15) if self.device == "cuda" else (3, 3)
        call()
        times = []
        for _ in range(repeats):
            self.wait()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - started) / calls * 1e6)
        self.wait()
        return round(median(times), 2)

    def generate(self, model: Any, batch: int, tokens: int, **how: Any) -> tuple[float, Tensor]:
        """Seconds of ``generate``, and the tokens that it returned."""
        generator = torch.Generator().manual_seed(batch)
        vocabulary = model.config.vocab_size
        ids = torch.randint(0, vocabulary, (batch, self.prompt), generator=generator)
        ids = ids.to(self.device)
        self.wait()
        started = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            eos_token_id=vocabulary,  # an id that is never generated
            do_sample=False,
            pad_token_id=0,
            **how,
        )
        self.wait()
        return time.perf_counter() - started, out[:, self.prompt :]

    def step_ms(self, model: Any, batch: int, **how: Any) -> float:
        """Milliseconds of a decode step."""
        self.generate(model, batch, 4, **how)
        short, _ = self.generate(model, batch, self.short, **how)
        long, _ = self.generate(model, batch, self.long, **how)
        return round((long - short) / (self.long - self.short) * 1e3, 3)


@contextmanager
def without_graphs() -> Iterator[None]:
    """While open, decode steps launch one by one the kernels that a graph would hold."""

    def eager(_: Any, forward: Any, cache: Any, kwargs: dict[str, Any]) -> Any:
        if not decode._is_step(cache, kwargs):
            return forward(**kwargs)
        return Step(cache, kwargs).run(forward, cache)

    with mock.patch.object(DecodeGraphs, "__call__", eager):
        yield


@torch.inference_mode()
def linears(run: Run, model: Any) -> dict[str, float]:
    """Host microseconds of linears alone and of the ops behind them."""
    from qtool.kernels.activation.quantize_activation import quantize_activation

    found = quantized_linears(model)
    name = next(name for name in found if name.endswith("o_proj"))
    linear, hidden = found[name], found[name].in_features
    times = {}
    for m in (1, 16):
        x = torch.randn(1, m, hidden, device=run.device, dtype=torch.bfloat16)
        times[f"linear M={m}"] = run.host_us(lambda x=x: linear(x))
        rows, kernel = x[0], linear.kernel(x.device, x.dtype)
        if kernel is not None:
            call = linear._call(rows, x.dtype)
            times[f"two ops M={m}"] = run.host_us(lambda c=call, k=kernel: k.multiply(c))
            assert torch.equal(kernel.multiply(call), linear(x)[0]), "direct launch and ops differ"
        if run.device == "cuda":
            quantize = (rows, None, None, "none", 0.0)
            times[f"quantize op M={m}"] = run.host_us(lambda a=quantize: quantize_activation(*a))
            weight = torch.randn(hidden, hidden, device=run.device, dtype=torch.bfloat16)
            times[f"bf16 linear M={m}"] = run.host_us(lambda x=x, w=weight: functional.linear(x, w))
    return times


@torch.inference_mode()
def kernels(run: Run, model: Any, batch: int) -> dict[str, Any]:
    """Microseconds of a decode step by kernel, and the number of launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as short:
        run.generate(model, batch, run.short)
    with profile(activities=[ProfilerActivity.CUDA]) as long:
        run.generate(model, batch, run.long)
    steps = run.long - run.short
    total: dict[str, list[float]] = {}
    for sign, profiled in ((-1, short), (1, long)):
        for event in profiled.key_averages():
            each = total.setdefault(event.key[:90], [0.0, 0.0])
            each[0] += sign * event.self_device_time_total / steps
            each[1] += sign * event.count / steps
    rows = sorted(total.items(), key=lambda row: -row[1][0])
    busy, launches = (round(sum(values[i] for _, values in rows), 1) for i in (0, 1))
    top = {name: [round(us, 1), round(count, 1)] for name, (us, count) in rows[:25]}
    return {"us": busy, "launches": launches, "us and launches": top}


@torch.inference_mode()
def attention(run: Run) -> dict[str, float]:
    """Attention over ranges against SDPA in float32, and its microseconds."""
    shape = SHAPES[run.shape]
    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim, capacity = shape["hidden_size"] // heads, 1280
    result = {}
    for batch in run.batches:
        query = torch.randn(batch, heads, 1, dim, device=run.device, dtype=torch.bfloat16)
        key, value = (
            torch.randn(batch, capacity, kv, dim, device=run.device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        at = torch.arange(capacity, device=run.device)
        first = torch.arange(batch, device=run.device)[:, None] % 7
        mask = ((at >= first) & (at < 1100 + first))[:, None, None]
        ranges = range_attention.ranges_of(mask)
        found = range_attention.attention_over_ranges(query, key, value, ranges, None)
        wide = [t.float() for t in (query, key, value)]
        expected = functional.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)
        error = (found.transpose(1, 2).float() - expected).norm() / expected.norm()
        result[f"error B={batch}"] = round(float(error), 5)
        from qtool.bench.cuda_graphs import graph_us

        call = [
            lambda a=(query, key, value, ranges, None): range_attention.attention_over_ranges(*a)
        ]
        result[f"us B={batch}"] = round(graph_us(call * 8), 1)
    return result


@torch.inference_mode()
def distances(run: Run, model: Any, batch: int) -> dict[str, float]:
    """The relative distance of logits of steps over given tokens from those of one forward."""
    from transformers import DynamicCache, StaticCache

    torch.manual_seed(0)
    vocabulary, steps, length = model.config.vocab_size, 8, run.prompt + 8
    ids = torch.randint(0, vocabulary, (batch, length), device=run.device)
    whole = model(ids, logits_to_keep=steps + 1).logits[:, :-1].float()
    found = {}
    for name in ("static", "dynamic"):
        cache: Any = StaticCache(config=model.config, max_cache_len=length + 8)
        if name == "dynamic":
            cache = DynamicCache(config=model.config)
        parts = [model(ids[:, : run.prompt], **{CACHE: cache}, logits_to_keep=1).logits]
        for at in range(run.prompt, length - 1):
            given: dict[str, Any] = {CACHE: cache}
            if name == "static":
                shown = torch.arange(length + 8, device=run.device) <= at
                given["attention_mask"] = shown.expand(batch, 1, 1, -1).clone()
                given["position_ids"] = torch.full((batch, 1), at, device=run.device)
            parts.append(model(input_ids=ids[:, at : at + 1], **given).logits)
        logits = torch.cat(parts, 1).float()
        found[name] = round(float((logits - whole).norm() / whole.norm()), 5)
    return found


def same(run: Run, model: Any, batch: int) -> dict[str, Any]:
    """Greedy tokens of three ways to decode."""
    count = run.short
    _, graphed = run.generate(model, batch, count)
    with without_graphs():
        _, eager = run.generate(model, batch, count)
    _, dynamic = run.generate(model, batch, count, cache_implementation="dynamic")
    agree = (dynamic == graphed).all(0).long().cumprod(0).sum()
    return {"graphs": torch.equal(graphed, eager), "dynamic up to": f"{int(agree)} of {count}"}


def measure(run: Run) -> None:
    """Every part of the run."""
    folder = Path(tempfile.mkdtemp())
    with run.part("make", 90):
        make(run.shape, run.scheme, folder, run.device)
    model: Any = None
    with run.part("load", 120):
        model = load.load(folder, device=run.device)
        merged = sum(linear.merged is not None for linear in quantized_linears(model).values())
        run.found["load"] = {"graphs": hasattr(model, "decode_graphs"), "merged linears": merged}
    shutil.rmtree(folder)
    if model is None:
        return
    with run.part("linear", 40):
        run.found["linear"] = linears(run, model)
    if run.device == "cuda":
        with run.part("attention", 40):
            run.found["attention"] = attention(run)
    with run.part("distance", 60):
        run.found["distance"] = distances(run, model, run.batches[min(1, len(run.batches) - 1)])
    with run.part("same", 60):
        run.found["same"] = same(run, model, run.batches[0])
        run.found["same batch"] = same(run, model, run.batches[-1])
    for batch in run.batches:
        with run.part(f"step B={batch}", 60):
            steps = {"graphs": run.step_ms(model, batch)}
            run.found[f"step B={batch}"] = steps
            if run.device == "cuda":
                with without_graphs():
                    steps["static, eager"] = run.step_ms(model, batch)
            steps["dynamic, eager"] = run.step_ms(model, batch, cache_implementation="dynamic")
    if run.device == "cuda":
        for batch in (run.batches[0], run.batches[-1]):
            with run.part(f"kernels B={batch}", 40):
                run.found[f"kernels B={batch}"] = kernels(run, model, batch)
    del model
    if run.device == "cuda":
        torch.cuda.empty_cache()
    with run.part("bf16", 90):
        config = LlamaConfig(**SHAPES[run.shape], tie_word_embeddings=False)
        with torch.device(run.device):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        run.found["bf16"] = {f"B={batch}": run.step_ms(plain, batch) for batch in run.batches}


def table(found: dict[str, Any], batches: list[int]) -> str:
    """Milliseconds of a step."""
    rows = ["batch   graphs   static, eager   dynamic, eager   bf16 by transformers"]
    for batch in batches:
        steps = found.get(f"step B={batch}", {})
        cells = [steps.get(name, "-") for name in ("graphs", "static, eager", "dynamic, eager")]
        plain = found.get("bf16", {}).get(f"B={batch}", "-")
        rows.append("{:5} {:>8} {:>15} {:>16} {:>22}".format(batch, *cells, plain))
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", default="w4a8-lqq", choices=sorted({s for s, _ in KERNELS}))
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--out", type=Path, help="JSON, as benchmarks/results/runtime.json")
    options = parser.parse_args()
    options.batches = [int(batch) for batch in options.batches.split(",")]
    options.shape = "tiny" if options.tiny else "llama-3-8b"
    options.prompt, options.tokens = (16, (3, 6)) if options.tiny else (1024, (16, 48))
    run = Run(options)
    measure(run)
    if options.out:
        store(options.out, run.found, device=options.device)
    print(json.dumps(run.found.get("linear")))
    print(table(run.found, options.batches))
    return min(run.failed, 1)


if __name__ == "__main__":
    sys.exit(main())
