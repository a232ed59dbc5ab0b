"""The bundled model through every step on a GPU: quantize, verify, perplexity against the CPU's,
generate.

    python benchmarks/kernels/end_to_end.py [--schemes w4a8-lqq,w8a8] [--kv kv4] [--dtype float32]
    [--text wikitext2] python benchmarks/kernels/end_to_end.py --schemes w4a4-g128 --text wikitext2
    --given DIR

(kv8 calibrates on the demo text. DIR/SCHEME is a checkpoint; DIR/SCHEME.json is the output of
`qtool eval TEXT --model DIR/SCHEME --deterministic --json` on a CPU, which takes long.)

It prints one line for each scheme. It exits with 1 if a packed linear is wrong, if the perplexity
on CUDA is over 1e-3 (relative) from the CPU reference's, or if decoding through the packed cache
differs from the logits of one forward or did not use the kernel.

With --deterministic quantized activations are the same on both devices
(qtool/eval/deterministic.py), and the remaining difference comes from the head. The largest
difference of a window's log-perplexity is printed too. Decoded logits may differ from those of one
forward by half more than without the kernel: two independent roundings are 1.4 times as far from
each other as one of them is from the exact value.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from qtool.models.cache_argument import CACHE
from qtool.runtime import kv_attention, kv_cache
from qtool.runtime.kv_cache import QuantCache
from qtool.runtime.load import load, load_tokenizer

SCHEMES = "w4a8-lqq,w4a8-qoq-g128,w4a8-qoq,w8a8"
PERPLEXITY, LOGITS, BESIDE = 1e-3, 0.03, 1.5
PROMPT, DECODED = 48, 80


def qtool(*arguments: str) -> str:
    """Run a qtool command; returns its output, or raises SystemExit with its message."""
    done = subprocess.run(
        [sys.executable, "-m", "qtool", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"qtool {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def windows(printed: str) -> Tensor:
    """Mean NLL of each window, nats a token, from the output of `qtool eval --json`."""
    return torch.tensor(
        json.loads(printed)["tasks"][0]["details"]["window_nll"], dtype=torch.float64
    )


def evaluate(text: str, directory: Path, device: str, dtype: str) -> Tensor:
    """The negative log-likelihood of each window, computed as in ``qtool eval``."""
    return windows(
        qtool(
            *("eval", text, "--model", str(directory), "--device", device, "--dtype", dtype),
            *("--deterministic", "--json"),
        )
    )


@torch.no_grad()
def decode(directory: Path) -> tuple[float, float, int, str]:
    """Distance of decoded logits from one forward's, through the cache's kernel and with SDPA on
    the dequantized cache; calls of the kernel; a greedy continuation.
    """
    model: Any = load(directory, device="cuda")
    tokenizer = load_tokenizer(directory)
    text = (Path(__file__).parents[2] / "qtool/demo/heldout.txt").read_text()[:4000]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : PROMPT + DECODED].cuda()
    batch = torch.cat([ids, ids.roll(7, 1)])
    whole = model(batch).logits[:, PROMPT - 1 :].float()

    def distance() -> float:
        cache, parts = QuantCache.of(model), []
        parts.append(model(batch[:, :PROMPT], **{CACHE: cache}).logits[:, -1:])
        for at in range(PROMPT, batch.shape[1]):
            parts.append(model(batch[:, at : at + 1], **{CACHE: cache}).logits)
        return float((torch.cat(parts, 1).float() - whole).norm() / whole.norm())

    with mock.patch.object(kv_attention, "_packed", wraps=kv_attention._packed) as calls:
        found = distance()
    with mock.patch.object(kv_cache, "kernel_reads", return_value=False):
        dequantized = distance()
    written = model.generate(ids[:, :PROMPT], max_new_tokens=24, do_sample=False)
    return found, dequantized, calls.call_count, str(tokenizer.decode(written[0, PROMPT:]))


def main() -> int:
    """Print a line for each scheme; returns 1 if perplexity, logits or kernels are wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--kv", default="kv4")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        help="of what is not quantized, where perplexities are compared",
    )
    parser.add_argument(
        "--text", default="demo", help="whose perplexities are compared, as of qtool eval"
    )
    parser.add_argument(
        "--given", type=Path, help="checkpoints and the CPU's evaluations of the text"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("end_to_end.py: a CUDA device is needed")
    schemes, wrong = args.schemes.split(","), 0
    how = ["--kv", args.kv]
    if args.kv == "kv8":
        how += ["--recipe", "fast", "--calib", "demo", "--samples", "16", "--seqlen", "256"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        outs = {scheme: (args.given or Path(folder)) / scheme for scheme in schemes}
        made = {
            scheme: pool.submit(
                qtool, "quantize", "demo", "--scheme", scheme, "--out", str(out), *how
            )
            for scheme, out in outs.items()
            if not args.given
        }
        for scheme, out in outs.items():
            if not args.given:
                made[scheme].result()
            verified = pool.submit(qtool, "verify", str(out), "--device", "cuda")
            cuda = pool.submit(evaluate, args.text, out, "cuda", args.dtype)
            if args.given:
                cpu = windows(out.with_name(f"{scheme}.json").read_text())
            else:
                cpu = evaluate(args.text, out, "cpu", args.dtype)
            distance, dequantized, calls, written = decode(out)
            difference = cuda.result() - cpu
            change, most = float(difference.mean().expm1()), float(difference.abs().max())
            unused = args.kv in ("kv4", "kv8") and calls == 0
            bad = abs(change) > PERPLEXITY or distance > max(LOGITS, BESIDE * dequantized) or unused
            wrong += bad
            print(
                f"{'FAILED ' if bad else ''}{scheme} {args.kv}: perplexity "
                f"{float(cpu.mean().exp()):.5f} CPU, "
                f"{float(cuda.result().mean().exp()):.5f} CUDA ({change:+.1e}, a window at most "
                f"{most:.1e}); "
                f"decoded logits {distance:.1e} from one forward, {calls} calls, "
                f"{dequantized:.1e} without the kernel; "
                f"{written!r}",
                flush=True,
            )
            print("   ", verified.result().strip().splitlines()[-1], flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
