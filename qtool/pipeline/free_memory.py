"""The memory of a GPU and of the host that this process may use: in total, and now."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path("/")
#: control groups of version 2 and 1, by the controllers in /proc/self/cgroup: their folder, the
#: files of the limit and of what is in use, and the prefix of its counts in memory.stat
CGROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def gpu_memory(device: torch.device) -> tuple[float, float]:
    """Bytes of a GPU that this process may use: in total, and now.

    ``torch.cuda.set_per_process_memory_fraction`` may limit them.
    """
    free, whole = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device.index) * whole
    return share, min(free, share - torch.cuda.memory_reserved(device))


def host_memory() -> tuple[float, float]:
    """Bytes of the host, or of the container, that processes may use: in total, and now.

    The second number is the kernel's estimate, which counts cached files as free memory.
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        free = _facts(ROOT / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        free = whole // 2
    wholes, free_now = zip((whole, free), *_container_memory(), strict=True)
    return min(wholes), min(free_now)


def _container_memory() -> Iterator[tuple[int, int]]:
    """:func:`host_memory` by each limit of a control group (``/proc/meminfo`` has no limits)."""
    with suppress(OSError):
        for line in (ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in CGROUPS:
                continue
            folder, limit, used, files = CGROUPS[controllers]
            group = ROOT / folder / path.lstrip("/")
            for place in (group, *group.parents):  # its parents limit it too
                with suppress(OSError, KeyError, ValueError):  # no such file, or no limit: "max"
                    whole = int((place / limit).read_text())
                    facts = _facts(place / "memory.stat")
                    cached = facts[f"{files}inactive_file"] + facts[f"{files}active_file"]
                    yield whole, whole - int((place / used).read_text()) + cached


def _facts(path: Path) -> dict[str, int]:
    """The numbers by name in a kernel's file with lines ``name number``."""
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}
