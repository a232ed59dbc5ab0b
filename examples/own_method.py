"""A calibration method of one's own: weight equalization, in 30 lines.

Each output channel of up_proj and the input channel of down_proj that reads it share a factor that
does not change the model: dividing one and multiplying the other by it evens their ranges out
(data-free quantization, Nagel et al., 2019, equation 11). The script quantizes with and without it.

    python examples/own_method.py --model demo
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import qtool
from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.method import Transform


@dataclass
class Equalize(Transform):
    """Give the rows of up_proj and the columns of down_proj equal ranges.

    Args:
        strength: 1 evens the ranges out, 0 does nothing.
    """

    strength: float = 1.0

    name = "equalize"
    needs_data = False

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        up, down = block.weight("mlp.up_proj"), block.weight("mlp.down_proj")  # [I, H], [H, I]
        rows, columns = up.float().abs().amax(1), down.float().abs().amax(0)  # [I]
        factor = (columns / rows).sqrt().pow(self.strength)
        factor[(rows == 0) | (columns == 0)] = 1  # a channel that carries nothing
        # gate(x) * up(x) scales with up's rows and its bias
        block.change_rows("mlp.up_proj", partial(torch.einsum, "i,i...->i...", factor))
        down.div_(factor[None])


def recipe(*transforms: Any) -> dict[str, Any]:
    """w4a16 in groups of 128 after ``transforms``, rounded to nearest."""
    return {
        "scheme": "equalized",
        "layers": [{"match": ".*", "scheme": "w4a16", "group_size": 128}],
        "transforms": list(transforms),
        "rounding": "rtn",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="a Llama-like model")
    parser.add_argument("--limit", type=int, default=8, help="windows of the perplexity")
    options = parser.parse_args()

    qtool.register_method(Equalize)
    with tempfile.TemporaryDirectory() as work:
        for name, steps in {"plain": (), "equalized": ({"equalize": {"strength": 0.5}},)}.items():
            done = qtool.quantize(options.model, recipe=recipe(*steps), out=Path(work) / name)
            results, _ = qtool.evaluate(["demo"], done, limit=options.limit)
            print(f"{name}: perplexity {results['demo'].metrics['perplexity'].value:.3f}")


if __name__ == "__main__":
    main()
