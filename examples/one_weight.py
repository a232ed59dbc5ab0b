"""One weight fitted, rounded, packed, unpacked and multiplied, with a picture of it.

    python examples/one_weight.py --scheme w4a8-lqq --layout dual-mma --plot one_weight.png

--plot draws every step as a picture.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from qtool import layouts, schemes
from qtool.io.model_directory import directory_of
from qtool.io.source import Checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--weight", default="model.layers.0.mlp.down_proj.weight")
    parser.add_argument("--scheme", default="w4a8-lqq")
    parser.add_argument("--layout", default="dual-mma")
    parser.add_argument("--plot", type=Path, help="write a picture to this file")
    options = parser.parse_args()

    weight = Checkpoint(directory_of(options.model)).read(options.weight).float()  # [N, K]
    scheme, layout = schemes.get(options.scheme), layouts.get(options.layout)

    params = scheme.fit(weight)  # scales and zero points, [N] or [N, G]
    codes = scheme.quantize(weight, params)  # integers, one a byte, [N, K]
    scheme.check(codes, params)  # no product or sum can overflow
    packed = layout.pack(codes)  # the bytes of the checkpoint, as the kernel reads them
    again = layout.unpack(packed, *weight.shape, signed=scheme.signed)
    assert torch.equal(again, codes)

    rounded = scheme.dequantize(codes, params)  # what the integers stand for, [N, K]
    x = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0))  # [M, K]
    y = scheme.matmul(x, codes, params)  # the scheme's own arithmetic, [M, N]

    stored = sum(t.nbytes for t in (*packed.values(), *params.values()))
    print(f"{options.weight}: {weight.shape[0]} x {weight.shape[1]}")
    for name, param in params.items():
        print(f"  {name}: {param.dtype} {list(param.shape)}")
    print(f"  {8 * stored / weight.numel():.2f} bits a weight")
    print(f"  relative error of the weight {relative(rounded, weight):.4f}")
    print(f"  relative error of the output {relative(y, x @ weight.t()):.4f}")
    if options.plot:
        draw(weight, codes, rounded, options.plot)


def relative(found: Tensor, exact: Tensor) -> float:
    """``||found - exact|| / ||exact||``."""
    return float((found - exact).norm() / exact.norm())


def draw(weight: Tensor, codes: Tensor, rounded: Tensor, path: Path) -> None:
    """The corner of the weight, its codes and what rounding changed, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    corner = slice(0, 64), slice(0, 128)
    pictures = {"weight": weight, "codes": codes, "rounding error": rounded - weight}
    figure, axes = pyplot.subplots(len(pictures), 1, figsize=(8, 10), layout="constrained")
    for axis, (title, values) in zip(axes, pictures.items(), strict=True):
        image = axis.imshow(values[corner].float(), aspect="auto", cmap="RdBu_r")
        axis.set(title=title, xlabel="input channel", ylabel="output channel")
        figure.colorbar(image, ax=axis)
    figure.savefig(path, dpi=120)
    print(f"  {path}")


if __name__ == "__main__":
    main()
