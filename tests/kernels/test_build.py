"""Every kernel compiles without a GPU, and the compiler's report and machine code are what they
must be.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qtool.errors import QtoolError
from qtool.kernels import build
from qtool.kernels.experts import combine
from tests.kernels import machine_code
from tests.kernels.machine_code import BUILDS

TINY = 'extern "C" __global__ void tiny(int* p) { *p = VALUE; }'
#: one build of each source, which is compiled whatever is stored
ANEW = {case.definition[0]: case for case in BUILDS}


@pytest.mark.parametrize("case", BUILDS, ids=lambda case: f"{case.name} {case.arch}")
def test_compiles_to_the_machine_code_it_must_be(case: build.Build, tmp_path: Path) -> None:
    if case in ANEW.values() or not machine_code.passed(case):
        machine_code.check(case, tmp_path)


def test_what_is_stored_is_of_these_sources() -> None:
    """``python -m tests.kernels.machine_code`` checks what changed and stores it."""
    assert machine_code.stored()["passed"] == machine_code.digests()


def test_a_digest_is_of_all_that_is_compiled() -> None:
    included = {
        name for case in BUILDS for name in machine_code.included(f"{case.definition[0]}.cu")
    }
    there = {path.relative_to(build.SOURCES).as_posix() for path in build.SOURCES.rglob("*.cu*")}
    assert included == there
    assert not [case for case in BUILDS if "#include" in case.definition[1]]
    case, *others = BUILDS
    assert machine_code.digest(replace(case, threads=1)) != machine_code.digest(case)
    assert len({machine_code.digest(other) for other in others}) == len(others)


def test_covers_the_architectures_and_names_each_build_once() -> None:
    assert set(build.ARCHS) == {case.arch for case in BUILDS}
    assert {arch for arch, _ in build.ARCHITECTURES.values()} - {"sm_86"} == set(build.ARCHS)
    assert len({(case.name, case.arch) for case in BUILDS}) == len(BUILDS)


def test_cache_is_keyed_and_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "tiny.cu").write_text(TINY)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("QTOOL_CACHE_DIR", str(tmp_path / "cache"))
    build._sources_hash.cache_clear()
    try:
        first = build.cubin("tiny", "", {"VALUE": 1}, "sm_90a")
        assert build.cubin("tiny", "", {"VALUE": 1}, "sm_90a") == first
        build.cubin("tiny", "", {"VALUE": 2}, "sm_90a")
        entries = sorted(p.suffix for p in (tmp_path / "cache" / "kernels").iterdir())
        assert entries == [".cubin", ".cubin"]
        with pytest.raises(QtoolError, match="does not compile"):
            build.cubin("tiny", "nonsense", {"VALUE": 1}, "sm_90a")
    finally:
        build._sources_hash.cache_clear()


def test_all_are_compiled_into_the_cache_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE_DIR", str(tmp_path))
    half, brain = (combine.definition(dtype) for dtype in (torch.float16, torch.bfloat16))
    build.compile_all([half, brain, half], "sm_90a")
    entries = list((tmp_path / "kernels").rglob("*"))
    assert sorted(path.suffix for path in entries if path.is_file()) == [".cubin", ".cubin"]
    monkeypatch.setattr(build, "compile_source", None)
    assert build.cubin(*half, "sm_90a") != build.cubin(*brain, "sm_90a")


def test_threads_compile_no_kernel_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different ones at once: each of two waits until the other is being compiled too."""

    class SlowlyHashed(type(tmp_path)):  # type: ignore[misc]
        def __hash__(self) -> int:
            time.sleep(0.01)
            return super().__hash__()

    monkeypatch.setattr(build, "cache_dir", lambda: SlowlyHashed(tmp_path))
    both, compiled = threading.Barrier(2, timeout=60), []

    def compile_source(name: str, *args: object) -> build.Compiled:
        compiled.append(name)
        both.wait()
        time.sleep(0.1)
        return build.Compiled(name.encode(), "")

    monkeypatch.setattr(build, "compile_source", compile_source)
    names = ["one", "two", "one", "two"]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: build.cubin(name, "", {}, "sm_90a"), names))
    assert found == [name.encode() for name in names] and sorted(compiled) == ["one", "two"]


def test_a_cache_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as that of a container without a home directory; the kernels run all the same."""
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QTOOL_CACHE_DIR", "~/home")
    build._say_not_kept.cache_clear()
    for dtype in (torch.float16, torch.bfloat16):
        source = combine.definition(dtype)
        assert build.cubin(*source, "sm_90a") == build.compile_source(*source, "sm_90a").cubin
    (said,) = caplog.messages
    assert said.startswith(f"compiled kernels are not kept in {tmp_path}/home/kernels (Not a dir")


def test_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(QtoolError, match=r"pip install 'qtool\[cuda\]'") as error:
        build.toolchain()
    assert "\n" not in str(error.value)
