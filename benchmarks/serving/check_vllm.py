"""Compares vLLM on native checkpoints with qtool's runtime: kernels, outputs and greedy tokens.

    python benchmarks/serving/check_vllm.py DIR [--eager] [--text FILE] [--tokens N]
    [--tensor-parallel N]

The last line has the number of wrong rows, which is also the exit status.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from qtool.errors import QtoolError
from qtool.runtime.load import load_tokenizer
from qtool.serving.verify import verify_in_vllm


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--text", type=Path, help="prompts are its windows; without it they are random ids"
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    options = parser.parse_args()
    if find_spec("vllm") is None:
        sys.exit("check_vllm.py: vLLM is not installed; make test-serving installs it")
    prompts = None
    if options.text:
        ids = load_tokenizer(options.directory)(options.text.read_text())["input_ids"]
        count, length = options.prompts, options.prompt_tokens
        prompts = torch.tensor(ids[: count * length]).view(count, length).tolist()
    wrong = 0
    try:
        rows = list(
            verify_in_vllm(
                options.directory,
                prompts=prompts,
                tokens=options.tokens,
                compiled=not options.eager,
                tensor_parallel=options.tensor_parallel,
            )
        )
    except QtoolError as error:
        print(f"{options.directory.name}: {error}")
        return 2
    for row in rows:
        wrong += bool(row.problem)
        print(
            f"{row.name}: {row.ran}, distance "
            f"{row.error:.1e}{f'; WRONG: {row.problem}' if row.problem else ''}"
        )
    how = "eager" if options.eager else "compiled"
    print(
        f"RESULT {options.directory.name}, {how}: {len(rows)} rows, {wrong} wrong; {rows[-1].ran}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
