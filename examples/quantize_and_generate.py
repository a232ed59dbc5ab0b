"""Quantize a model, load the result and let it write.

python examples/quantize_and_generate.py --model demo --scheme w4a8-lqq
"""

import argparse
import tempfile
from pathlib import Path

import qtool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="a directory, a hub id or demo")
    parser.add_argument("--scheme", default="w4a8-lqq")
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", default="It was a dark night, and")
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as work:
        done = qtool.quantize(
            options.model,
            options.scheme,
            recipe=options.recipe,
            out=Path(work) / "quantized",
            device=options.device,
        )
        print(f"{done.ratio:.2f} times smaller")
        model = qtool.load(done, device=options.device)
        tokenizer = qtool.load_tokenizer(done)
    prompt = tokenizer(options.prompt, return_tensors="pt").to(options.device)
    written = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False)
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
