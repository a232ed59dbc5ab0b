"""Compile CUDA C++ with NVRTC at first use, keep the result on disk, load it.

The cache key is the hash of every source, every flag, the compiler's version and the architecture.
An entry appears by an atomic rename: two processes may compile the same kernel twice and store
equal entries, and a killed process leaves at most a temporary file. ``QTOOL_CACHE_DIR`` or the
user's cache directory holds the entries.
"""

import hashlib
import io
import logging
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any

from qtool.errors import QtoolError, expand_home

log = logging.getLogger(__name__)

SOURCES = resources.files("qtool.kernels") / "csrc"
FLAGS: dict[str, Any] = {"std": "c++17", "ptxas_options": ["-v"]}
#: NVRTC's name and the KiB of shared memory that a block may have, by compute capability
ARCHITECTURES = {
    (8, 0): ("sm_80", 163),
    (8, 6): ("sm_86", 99),
    (8, 9): ("sm_89", 99),
    (9, 0): ("sm_90a", 227),
    (10, 0): ("sm_100", 227),
    (10, 3): ("sm_100", 227),
    (12, 0): ("sm_120", 99),
    (12, 1): ("sm_120", 99),
}
#: architectures that kernels are compiled for in the tests; sm_89 stands for sm_86 too
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")

#: threads that import cuda.core at once may find half of it
_IMPORTING = Lock()
#: a lock for each entry of the cache, by its path as a string: in the hash of a Path, which is
#: Python code, another thread may make a second lock
_COMPILING: defaultdict[str, Lock] = defaultdict(Lock)

#: source name, prologue and macros of a kernel
Source = tuple[str, str, dict[str, int]]


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel, and the compiler's log."""

    cubin: bytes
    log: str

    @property
    def registers(self) -> int:
        return max(map(int, re.findall(r"Used (\d+) registers", self.log)))

    @property
    def local_bytes(self) -> int:
        """Bytes of stack frame and of register spills: 0 in every kernel meant to be fast."""
        return sum(
            map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", self.log))
        )

    @property
    def serialized(self) -> bool:
        """Whether the compiler serialized wgmma instructions (warnings C7510 to C7515)."""
        return "wgmma.mma_async instructions are serialized" in self.log


@dataclass(frozen=True)
class Build:
    """One kernel for one architecture, and the properties that its machine code must have.

    A kernel's module lists its ``builds()``.

    Attributes:
        name: unique name of the kernel and its variant.
        arch: ``sm_80``, ``sm_89``, ``sm_90a``, ``sm_100``, ``sm_120``.
        definition: source name, prologue and macros, the arguments of :func:`cubin`.
        threads: number of threads that a multiprocessor must hold at once, by its registers.
        instructions: texts that the SASS must contain (``IGMMA.64x8x32.``, ``IMMA.16832.S8.S8``).
        calls: subroutines are allowed (a division's slow path, emulated s4 on Hopper); else any RET
            is a fault.
    """

    name: str
    arch: str
    definition: Source
    threads: int
    instructions: tuple[str, ...] = ()
    calls: bool = False


def toolchain() -> Any:
    """``cuda.core``'s Program and ProgramOptions and the NVRTC version.

    Raises:
        QtoolError: if the ``[cuda]`` extra is missing.
    """
    try:
        with _IMPORTING:
            from cuda.bindings import nvrtc

            try:
                from cuda.core import Program, ProgramOptions
            except ImportError:  # before cuda-core 0.5
                from cuda.core.experimental import Program, ProgramOptions
        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise QtoolError(
            "the CUDA kernels are compiled at first use and need the extra: pip install "
            f"'qtool[cuda]' ({error})"
        ) from None
    return Program, ProgramOptions, f"{major}.{minor}"


@lru_cache(maxsize=1)
def _sources_hash() -> str:
    with resources.as_file(SOURCES) as folder:
        texts = sorted(
            (str(path.relative_to(folder)), path.read_text()) for path in folder.rglob("*.cu*")
        )
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def compile_source(name: str, prologue: str, defines: Mapping[str, int], arch: str) -> Compiled:
    """Compile ``csrc/<name>.cu`` after ``prologue`` for ``arch``, without cache or GPU.

    Raises:
        QtoolError: if the compiler refuses; the message holds its log.
    """
    program_type, options_type, _ = toolchain()
    with resources.as_file(SOURCES) as folder:
        options = options_type(
            name=f"{name}.cu",
            arch=arch,
            **FLAGS,
            include_path=str(folder),
            define_macro=[(key, str(value)) for key, value in defines.items()],
        )
        log = io.StringIO()
        try:
            program = program_type(prologue + (folder / f"{name}.cu").read_text(), "c++", options)
            cubin = program.compile("cubin", logs=log).code
        except Exception as error:
            raise QtoolError(
                f"kernel {name} does not compile for {arch} with {dict(defines)}: {error}"
            ) from error
    return Compiled(bytes(cubin), log.getvalue())


def cache_dir() -> Path:
    """The directory of compiled kernels."""
    if configured := os.environ.get("QTOOL_CACHE_DIR"):
        return expand_home(configured) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qtool" / "kernels"


def cubin(name: str, prologue: str, defines: Mapping[str, int], arch: str) -> bytes:
    """Machine code of a kernel, from the cache or compiled and put there.

    A cache that cannot be written keeps nothing, which the log says once.
    """
    version = toolchain()[2]
    key = (
        name,
        prologue,
        sorted(defines.items()),
        arch,
        version,
        sorted(FLAGS.items()),
        _sources_hash(),
    )
    path = cache_dir() / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.cubin"
    with _COMPILING[str(path)]:  # threads compile different kernels at once, but none twice
        try:
            return path.read_bytes()
        except OSError:
            code = compile_source(name, prologue, defines, arch).cubin
        try:
            _keep(path, code)
        except OSError as error:
            _say_not_kept(cache_dir(), error.strerror)
        return code


def _keep(path: Path, code: bytes) -> None:
    """Write ``code`` to ``path``, which appears at once; other processes may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@lru_cache(maxsize=1)
def _say_not_kept(directory: Path, reason: str | None) -> None:
    log.warning(
        "compiled kernels are not kept in %s (%s), and compiled anew by each process: the variable "
        "QTOOL_CACHE_DIR names another place",
        directory,
        reason,
    )


def compile_all(sources: Iterable[Source], arch: str) -> None:
    """Compile distinct ``sources`` into the cache, on all cores."""
    distinct = {repr(source): source for source in sources}
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(_compile, arch=arch), distinct.values(), chunksize=4))


def _compile(source: Source, arch: str) -> None:
    cubin(*source, arch)
