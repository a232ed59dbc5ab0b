"""The report's first numbers, its sizes and its checks."""

from collections.abc import Sequence

from qtool.report import svg
from qtool.report.data import Report, Size
from qtool.report.html import Html, figure, join, nbytes, plots, table, tag


def title(report: Report) -> str:
    """``source, scheme``."""
    source = report.provenance.get("source", {}).get("directory", report.directory.name)
    return f"{source}, quantized to {report.quantization['scheme']}"


def tiles(report: Report) -> Html:
    """The four numbers a reader looks for first."""
    packed, stored = [s for s in report.sizes if s.packed], sum(s.nbytes for s in report.sizes)
    plain = 2 * sum(s.weights for s in report.sizes)
    shown = [("Size", nbytes(stored), f"{nbytes(plain)} at 16 bits a weight")]
    if packed:
        total = _total("", packed)
        shown.append(
            (
                "Bits a weight",
                f"{total.bits:.2f}",
                f"in {total.count} quantized linears, scales included",
            )
        )
    perplexity = next((q for q in report.quality if q.result.kind == "perplexity"), None)
    if perplexity:
        rise = (
            f"× {perplexity.change.ratio:.4f} of the baseline's"
            if perplexity.change
            else "no baseline to compare"
        )
        shown.append(
            (f"Perplexity, {perplexity.result.task}", f"{perplexity.value.value:.3f}", rise)
        )
    bad = sum(len(check.problems) for check in report.checks)
    count = sum(check.count for check in report.checks)
    shown.append(
        (
            "Checks passed",
            f"{count - bad} of {count}",
            "packed bytes equal their reference" if not bad else "see Verification",
        )
    )
    return tag(
        "div",
        *(
            tag("div", tag("div", a), tag("strong", b), tag("div", c), class_="tile")
            for a, b, c in shown
        ),
        class_="tiles",
    )


def size(report: Report) -> Html:
    """Stored bytes against 16 bits a weight, then by role."""
    packed, other = [s for s in report.sizes if s.packed], [s for s in report.sizes if not s.packed]
    rows = [*sorted(packed, key=lambda s: -s.nbytes), *sorted(other, key=lambda s: -s.nbytes)]
    total = _total("everything", rows)
    header = ("tensors", "stored as", "count", "weights", "bytes", "bits a weight")
    cells = [
        (s.role, s.format, s.count, f"{s.weights:,}", nbytes(s.nbytes), f"{s.bits:.3f}")
        for s in [*rows, total]
    ]
    plain = 2 * total.weights
    drawn = [
        ("16 bits a weight", plain, nbytes(plain), "before"),
        ("this checkpoint", total.nbytes, nbytes(total.nbytes), ""),
    ]
    share = sum(s.nbytes for s in packed) / total.nbytes
    reading = f"{total.nbytes / plain:.1%} of the 16-bit size; {share:.0%} of the stored bytes are quantized linears."
    if other:
        rest = 8 * sum(s.nbytes for s in other) / sum(s.weights for s in other)
        reading += f" The rest, not quantized, has {rest:.1f} bits a weight."
    return join(
        plots(figure("", svg.bars("Stored bytes", drawn), reading)),
        table(header, cells, "llrrrr", last_is_sum=True),
    )


def _total(name: str, sizes: Sequence[Size]) -> Size:
    return Size(
        name,
        "",
        sum(s.count for s in sizes),
        sum(s.weights for s in sizes),
        sum(s.nbytes for s in sizes),
        False,
    )


def verification(report: Report) -> Html:
    """What ran, against the reference; every problem."""
    rows = [
        (c.ran or "file or format", c.count, len(c.problems), f"{c.error:.1e}" if c.ran else "")
        for c in report.checks
    ]
    problems = [problem for check in report.checks for problem in check.problems]
    text = (
        "Every packed linear: shapes and types, the scheme's overflow invariants, packing the unpacked codes gives the "
        "stored bytes, and its output on random inputs against the same integers in float64. The files' hashes are "
        "those that the run recorded."
    )
    good = tag("p", "All checks passed.", class_="good")
    bad = tag("ul", *(tag("li", problem) for problem in problems), class_="bad")
    header = ("what ran", "linears", "failed", "largest relative distance")
    again = tag(
        "p", "Again: ", tag("code", f"qtool verify {report.directory} --verbose"), class_="quiet"
    )
    return join(bad if problems else good, tag("p", text), table(header, rows, "lrrr"), again)
