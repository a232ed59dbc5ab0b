"""Draw the pictures of README and docs: ``python benchmarks/pictures.py`` writes docs/images/*.svg.

The picture of quality against speed is drawn from stored results; the others are explanations.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.colors
import matplotlib.pyplot as plt
import numpy
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "qtool"

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
INK, BLUE, ORANGE, GREEN, GREY = "#263238", "#3f51b5", "#ef6c00", "#2e7d32", "#b0bec5"
#: columns of the kernels' results that run a scheme; the scheme's time is between their times
COLUMNS = {
    "w8a8": ["w8a8"],
    "w4a16": ["w4a16-g128"],
    "w4a8-lqq": ["w4a8-lqq-g64"],
    "w4a8-qoq-g128": ["w4a8-qoq-g128"],
    "w4a8-qoq": ["w4a8-qoq"],
    "w4ax-fmpq": ["w4ax-fmpq"],
    "w4a4-g128": ["w4a4-g128"],
    "w4a4-mix": ["w4a4", "w4a4-g32"],
    "w4a16-24": ["w4a16-24-g128"],
}
#: recipes that are shown for schemes whose `best` mixes schemes
SHOWN = {"w4a4-g128": "paper", "w4a4-mix": "paper"}
#: shifts of labels in points, if the space on the right is taken
LABELS = {
    "w4a8-qoq": (-7, 5),
    "w4a8-qoq-g128": (-7, -13),
    "w4a8-lqq": (7, -13),
    "w4a4-g128": (-7, -4),
    "w4a4-mix": (-7, -16),
    "w8a8": (-7, -4),
}


def figure(width: float, height: float) -> Axes:
    """Axes of a new figure, in inches."""
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": INK, "text.color": INK})
    return plt.subplots(figsize=(width, height), facecolor="white")[1]


def save(name: str) -> None:
    """Write the current figure to ``docs/images/NAME.svg``, the same bytes each time."""
    IMAGES.mkdir(exist_ok=True)
    plt.savefig(IMAGES / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close("all")


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def quality_speed(model: str = "llama-3-8b", tokens: int = 16) -> None:
    """KL divergence of each scheme's recipe on the demo against the time of a layer's linears."""
    times: dict[str, float] = {}
    for name in ("kernels-others", "kernels-w4a16", "kernels"):
        for row in results(name)["rows"]:
            if (row["model"], row["m"]) == (model, tokens):
                times |= row["us"]
    axes = figure(7.5, 4.2)
    for row in results("accuracy")["rows"]:
        shown = SHOWN.get(row["scheme"], "best")
        if row["recipe"] != shown:
            continue
        between = [times[column] for column in COLUMNS[row["scheme"]]]
        axes.plot(between, [row["kl"]] * len(between), "o-", markersize=7.5, color=BLUE, zorder=3)
        point = between[-1], row["kl"]
        shift = LABELS.get(row["scheme"], (7, -4))
        axes.annotate(
            row["scheme"] if shown == "best" else f"{row['scheme']} ({shown})",
            point,
            shift,
            textcoords="offset points",
            ha="right" if shift[0] < 0 else "left",
        )
    for name, colour in (("torch fp8", ORANGE), ("torch bf16", GREY)):
        axes.axvline(times[name], color=colour, linestyle="--", linewidth=1)
        axes.annotate(
            name,
            (times[name], 0.98),
            (-4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=colour,
            va="top",
            ha="right",
        )
    axes.set(
        yscale="log",
        xlabel=f"µs of a layer's linears, Llama-3-8B, {tokens} tokens, H200 (less is better)",
        ylabel="KL from full precision, nats, demo (less is better)",
    )
    axes.set_xlim(left=0)
    axes.margins(y=0.15)
    axes.grid(alpha=0.25)
    save("quality-speed")


def boxes(axes: Axes, texts: list[str], y: float = 0.5, colour: str = BLUE) -> None:
    """Boxes from left to right with arrows between."""
    step = 1 / len(texts)
    for i, text in enumerate(texts):
        left = i * step + 0.01
        axes.add_patch(
            FancyBboxPatch(
                (left, y - 0.13),
                step - 0.05,
                0.26,
                boxstyle="round,pad=0.005",
                facecolor="white",
                edgecolor=colour,
                linewidth=1.5,
            )
        )
        axes.text(left + (step - 0.05) / 2, y, text, ha="center", va="center", fontsize=8)
        if i + 1 < len(texts):
            start, end = (left + step - 0.045, y), (left + step, y)
            axes.add_patch(FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=12))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")


def block_loop() -> None:
    """The block loop of calibration."""
    axes = figure(11, 2.2)
    boxes(
        axes,
        [
            "read block i\n(ahead, by a thread)",
            "transforms\nfloat output unchanged",
            "rounding\ncodes and scales",
            "propagate the\nquantized output",
            "pack, write, record\n(behind, by a thread)",
        ],
    )
    axes.annotate(
        "",
        (0.11, 0.33),
        (0.71, 0.33),
        arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.08", "color": ORANGE},
    )
    axes.text(0.41, 0.04, "inputs of block i + 1", ha="center", color=ORANGE, fontsize=9)
    save("block-loop")


def pipeline() -> None:
    """Producer, ring and consumers of the W4A8 kernel."""
    axes = figure(11, 2.4)
    boxes(
        axes,
        [
            "weights: bulk copy\ntokens: TMA",
            "ring of stages in\nshared memory",
            "consumer warpgroup:\nnibbles to bytes",
            "wgmma s8 x s8,\nint32 sums",
            "epilogue: scales,\nbias, 16-bit out",
        ],
        0.72,
    )
    boxes(
        axes,
        ["", "", "second warpgroup,\none stage apart", "wgmma while the\nother dequantizes", ""],
        0.24,
        ORANGE,
    )
    for patch in [p for p in axes.patches if isinstance(p, FancyBboxPatch)][5:]:
        left = patch.get_x()
        if left < 0.35 or left > 0.75:
            patch.set_visible(False)
    for i, arrow in enumerate([p for p in axes.patches if isinstance(p, FancyArrowPatch)][4:]):
        arrow.set_visible(i == 2)  # the arrow between the two that stay
    start, end = (0.37, 0.58), (0.41, 0.38)  # the ring feeds both consumers
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=12))
    start, end = (0.75, 0.38), (0.79, 0.58)
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=12))
    save("pipeline")


def dual_mma() -> None:
    """The 64 x 64 tile of dual-mma, coloured by warp, with one thread's bytes marked."""
    axes = figure(6, 4.6)
    row, column = numpy.mgrid[:64, :64]
    warp, lane = row // 16, 4 * (row % 8) + column % 16 // 4
    shade = 0.15 + 0.12 * warp
    colours = matplotlib.colormaps["Blues"](shade)
    colours[(warp == 1) & (lane == 5)] = matplotlib.colors.to_rgba(ORANGE)
    axes.imshow(colours, extent=(0, 64, 64, 0), interpolation="nearest")
    axes.axvline(32, color="white", linewidth=2)
    axes.set(
        xlabel="input channel k: two k32 steps, low and high nibbles", ylabel="output channel n"
    )
    axes.set_title("one tile; orange: the 32 codes in the 16 bytes of warp 1, lane 5", fontsize=10)
    save("dual-mma")


def kv_page() -> None:
    """A page of the kv4 cache."""
    axes = figure(8, 1.1)
    parts = [
        ("4-bit codes: D/2 bytes a token", 0.72, BLUE),
        ("scale\nfp16", 0.13, ORANGE),
        ("zero\nfp16", 0.13, GREEN),
    ]
    left = 0.01
    for text, width, colour in parts:
        axes.add_patch(
            plt.Rectangle((left, 0.1), width, 0.6, facecolor="white", edgecolor=colour, lw=2)
        )
        axes.text(left + width / 2, 0.4, text, ha="center", va="center", fontsize=9)
        left += width
    axes.text(0.01, 0.8, "64 tokens of one head, keys; values likewise", fontsize=9)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    save("kv-page")


def main() -> None:
    global IMAGES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder that they go to")
    IMAGES = parser.parse_args().out
    IMAGES.mkdir(parents=True, exist_ok=True)
    for draw in (quality_speed, block_loop, pipeline, dual_mma, kv_page):
        draw()


if __name__ == "__main__":
    main()
