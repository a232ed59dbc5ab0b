"""The bundled model through every step on a GPU: quantize, verify, perplexity against the CPU's, generate.

    python benchmarks/kernels/end_to_end.py [--schemes w4a8-lqq,w8a8] [--kv kv4] [--dtype float32]

(kv8 calibrates on the demo text.)

Prints one line a scheme; exits 1 if a packed linear is wrong, if the perplexity on CUDA is over 1e-3 (relative) from
the CPU reference's, if decoding through the packed cache leaves the logits of one forward, or did not use the kernel.
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

from qtool.runtime import kv_attention
from qtool.runtime.kv_cache import QuantCache
from qtool.runtime.load import load, load_tokenizer

SCHEMES = "w4a8-lqq,w4a8-qoq-g128,w4a8-qoq,w8a8"
PERPLEXITY, LOGITS = 1e-3, 0.03
PROMPT, DECODED = 48, 80


def qtool(*arguments: str) -> str:
    """Run a qtool command; its output, or SystemExit with what it said."""
    done = subprocess.run([sys.executable, "-m", "qtool", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"qtool {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def perplexity(directory: Path, device: str, dtype: str) -> float:
    """Of the bundled held-out text."""
    found = json.loads(qtool("eval", "demo", "--model", str(directory), "--device", device, "--dtype", dtype, "--json"))
    return found["tasks"][0]["metrics"]["perplexity"]["value"]


@torch.no_grad()
def decode(directory: Path) -> tuple[float, int, str]:
    """Distance of decoded logits from one forward's, calls of the kernel, and a greedy continuation."""
    model: Any = load(directory, device="cuda")
    tokenizer = load_tokenizer(directory)
    text = (Path(__file__).parents[2] / "qtool/demo/heldout.txt").read_text()[:4000]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : PROMPT + DECODED].cuda()
    batch = torch.cat([ids, ids.roll(7, 1)])
    whole = model(batch).logits[:, PROMPT - 1 :].float()
    cache, parts = QuantCache.of(model), []
    with mock.patch.object(kv_attention, "_packed", wraps=kv_attention._packed) as calls:
        parts.append(model(batch[:, :PROMPT], past_key_values=cache).logits[:, -1:])
        for at in range(PROMPT, batch.shape[1]):
            parts.append(model(batch[:, at : at + 1], past_key_values=cache).logits)
    stepped = torch.cat(parts, 1).float()
    distance = float((stepped - whole).norm() / whole.norm())
    written = model.generate(ids[:, :PROMPT], max_new_tokens=24, do_sample=False)
    return distance, calls.call_count, str(tokenizer.decode(written[0, PROMPT:]))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--kv", default="kv4")
    parser.add_argument("--dtype", default="bfloat16", help="of what is not quantized, where perplexities are compared")
    args = parser.parse_args()
    schemes, wrong = args.schemes.split(","), 0
    how = ["--kv", args.kv]
    if args.kv == "kv8":
        how += ["--recipe", "fast", "--calib", "demo", "--samples", "16", "--seqlen", "256"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        outs = {scheme: Path(folder) / scheme for scheme in schemes}
        made = {
            scheme: pool.submit(qtool, "quantize", "demo", "--scheme", scheme, "--out", str(out), *how)
            for scheme, out in outs.items()
        }
        for scheme, out in outs.items():
            made[scheme].result()
            verified = pool.submit(qtool, "verify", str(out), "--device", "cuda")
            cpu, cuda = (pool.submit(perplexity, out, device, args.dtype) for device in ("cpu", "cuda"))
            distance, calls, written = decode(out)
            change = cuda.result() / cpu.result() - 1
            unused = args.kv in ("kv4", "kv8") and calls == 0
            bad = abs(change) > PERPLEXITY or distance > LOGITS or unused
            wrong += bad
            print(
                f"{'FAILED ' if bad else ''}{scheme} {args.kv}: perplexity {cpu.result():.5f} CPU, {cuda.result():.5f} "
                f"CUDA ({change:+.1e}); decoded logits {distance:.1e} from one forward, {calls} calls; {written!r}",
                flush=True,
            )
            print("   ", verified.result().strip().splitlines()[-1], flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
