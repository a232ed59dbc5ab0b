"""A plan as text for people and as plain data."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from qtool.errors import QtoolError
from qtool.exchange.exportable import formats_that_take
from qtool.pipeline.job import Job
from qtool.pipeline.planning import memory
from qtool.pipeline.planning.plan import Plan, PlannedBlocks, PlannedLinear
from qtool.pipeline.quantize import result_config
from qtool.pipeline.streaming import activations
from qtool.recipes.schema import CONTINUED, GIVEN
from qtool.runtime.dispatch import not_served, serving_notes
from qtool.runtime.packed_linears import PackedLinears
from qtool.table import render
from qtool.units import bytes_text, duration, times


def as_dict(planned: Plan) -> dict[str, Any]:
    """The plan as plain data, for ``--json``."""
    job = planned.job
    rounded = planned.continuation is not None and planned.continuation.rounded
    exports, not_exported = _exports(job)
    linears = PackedLinears(job.config, job.format)
    kinds = [
        {
            "blocks": kind.blocks,
            "linears": [
                {
                    "name": x.name,
                    "scheme": x.scheme,
                    "group_size": x.group_size,
                    "layout": x.layout,
                    "shape": list(x.shape),
                    "bytes": x.nbytes,
                    "bits_per_weight": x.bits,
                }
                for x in kind.linears
            ],
        }
        for kind in planned.kinds
    ]
    return {
        "scheme": job.format.scheme,
        "recipe": job.recipe.variant,
        "methods": [method.name for method in job.methods],
        "kv": job.format.kv,
        "repacked": planned.repacked,
        "reason": job.recipe.reason,
        "notes": list(job.notes),
        "family": job.family.name,
        "derived": job.family.derived,
        "blocks": job.blocks,
        "kinds_of_blocks": kinds,
        "source_bytes": planned.source_bytes,
        "output_bytes": planned.output_bytes,
        "peak_host_bytes": planned.host_bytes,
        "seconds": planned.seconds,
        "seconds_to_compile": planned.compiling,
        "device": planned.device,
        "gpus": planned.gpus,
        "peak_device_bytes": planned.device_bytes,
        "device_memory_bytes": planned.device_memory,
        "activation_bytes": planned.activation_bytes,
        "activations": planned.place,
        "windows": CONTINUED if planned.continuation else GIVEN,
        "continued_by": memory.ROUNDED_SCHEME if rounded else None,
        "windows_shortage": planned.shortage or None,
        "disk_bytes": planned.disk_bytes,
        "resume_bytes": planned.resume_bytes,
        "not_served": not_served(linears).get("not served"),
        "export_formats": exports,
        "not_exported": not_exported or None,
    }


def as_text(planned: Plan) -> str:
    """The plan as text for people."""
    job = planned.job
    how = f"recipe {job.recipe.variant}: {' -> '.join(method.name for method in job.methods)}"
    if planned.repacked:
        how = f"repacked from {planned.repacked}, code for code"
    cache = f"KV cache in {job.format.kv}, " if job.format.kv else ""
    exports, not_exported = _exports(job)
    return "\n".join(
        [
            f"{job.family.name}, {job.blocks} blocks, {job.format.scheme}, {cache}{how}",
            *job.notes,
            _table(planned.kinds),
            f"read {bytes_text(planned.source_bytes)}, write {bytes_text(planned.output_bytes)} "
            f"({times(planned.source_bytes, planned.output_bytes)}) in "
            f"{len(planned.shard_bytes)} shards",
            *_costs(planned),
            *serving_notes(PackedLinears(job.config, job.format)),
            f"export formats: {', '.join(exports) or f'none, {not_exported}'}",
        ]
    )


def _table(kinds: Sequence[PlannedBlocks]) -> str:
    """A table with a row for each linear; its first column names the blocks of several kinds."""
    header = ("linear of a block", "shape", "scheme", "group", "layout", "bits", "MB")
    rows = [
        (
            _ranges(kind.blocks),
            name,
            f"{x.shape[0]} x {x.shape[1]}",
            x.scheme,
            x.group_size or ("channel" if x.layout else ""),
            x.layout,
            f"{x.bits:.3f}",
            f"{x.nbytes / 1e6:.2f}",
        )
        for kind in kinds
        for name, x in _experts_once(kind.linears)
    ]
    if len(kinds) == 1:
        return render(header, [row[1:] for row in rows])
    return render(("blocks", *header), rows)


def _ranges(numbers: Sequence[int]) -> str:
    """``numbers`` as text: 0, 1, 2 and 5 become ``0-2, 5``."""
    ends = [n for n in numbers if n + 1 not in numbers]
    starts = [n for n in numbers if n - 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _experts_once(linears: Sequence[PlannedLinear]) -> Iterator[tuple[str, PlannedLinear]]:
    """Names and linears, with one line for all experts of equal format."""
    groups: dict[tuple[str, object], list[PlannedLinear]] = {}
    for x in linears:
        name = re.sub(r"\.\d+\.", ".*.", x.name)
        groups.setdefault((name, (x.scheme, x.group_size, x.layout, x.shape)), []).append(x)
    for (name, _), found in groups.items():
        yield (f"{name} ({len(found)})" if len(found) > 1 else found[0].name), found[0]


def _exports(job: Job) -> tuple[list[str], str]:
    """The formats that the result can be exported to, or why there are none."""
    try:
        names = formats_that_take(job.format, result_config(job))
    except QtoolError as error:
        return [], str(error)
    return names, "" if names else "no format takes it"


def _costs(planned: Plan) -> Iterator[str]:
    """Lines on memory, time and disk."""
    took = f"time about {duration(planned.seconds)}"
    host = f"peak host memory about {bytes_text(planned.host_bytes)}"
    device, each = f"one {planned.device}", ""
    if planned.gpus > 1:
        device, each = f"{planned.gpus} {planned.device}s", " of each"
    first = f" (first run {planned.compiling:.0f} s more)" if planned.compiling else ""
    if not planned.device_bytes:
        yield f"on {planned.device}: {took}, {host}"
    else:
        yield (
            f"on {device}: {took}{first}, peak device memory"
            f"{each} about {bytes_text(planned.device_bytes)}, {host}"
        )
    if planned.device_bytes > planned.device_memory:
        yield f"it does not fit: the device has {bytes_text(planned.device_memory)}"
    if not planned.place:
        return
    if planned.shortage:
        yield f"calibration windows: to continue them {planned.shortage}"
    if planned.continuation:
        yield (
            "calibration windows: started by the text and continued by the "
            f"model{planned.continuation.how} (--windows given: all of the text)"
        )
    yield (
        f"calibration activations: {bytes_text(planned.activation_bytes)}, kept "
        f"{activations.PLACES[planned.place]}; disk {bytes_text(planned.disk_bytes)}, and where "
        f"there is room {bytes_text(planned.resume_bytes)} to continue from if killed"
    )
