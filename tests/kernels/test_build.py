"""Every kernel compiles without a GPU, and the compiler's report and machine code are what they
must be.
"""

import re
import subprocess
from pathlib import Path

import pytest

from qtool.errors import QtoolError
from qtool.kernels import build
from qtool.kernels.compiled import builds

REGISTERS_PER_SM = 65536
TINY = 'extern "C" __global__ void tiny(int* p) { *p = VALUE; }'


BUILDS = list(builds())
#: one of the builds of a source that differ in sizes alone: to disassemble takes longer than to
#: compile
DISASSEMBLED = {
    (case.definition[0], case.arch, case.instructions, case.calls): case for case in BUILDS
}


@pytest.mark.parametrize("case", BUILDS, ids=lambda case: f"{case.name} {case.arch}")
def test_compiles_to_the_machine_code_it_must_be(case: build.Build, tmp_path: Path) -> None:
    compiled = build.compile_source(*case.definition, case.arch)
    assert compiled.local_bytes == 0, compiled.log  # nothing is spilled
    assert not compiled.serialized, compiled.log
    assert compiled.registers * case.threads <= REGISTERS_PER_SM
    if case not in DISASSEMBLED.values():
        return
    sass = disassemble(compiled.cubin, tmp_path)
    assert [i for i in case.instructions if i not in sass] == []
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert case.calls or not re.search(
        r"\bRET\b", sass
    )  # CALL alone also stands for a jump out of a loop
    if (
        "PREEXIT" in sass
    ):  # griddepcontrol: the next kernel may start, but only when all before this one are done
        assert sass.index("ACQBULK") < sass.index("PREEXIT")


def test_covers_the_architectures_and_names_each_build_once() -> None:
    assert {"sm_80", "sm_89", "sm_90a"} <= {case.arch for case in BUILDS}
    assert len({(case.name, case.arch) for case in BUILDS}) == len(BUILDS)


def disassemble(cubin: bytes, folder: Path) -> str:
    """SASS text."""
    import nvidia

    (folder / "k.cubin").write_bytes(cubin)
    tool = next(p for root in nvidia.__path__ for p in Path(root).glob("*/bin/nvdisasm"))
    return subprocess.run(
        [tool, "-c", folder / "k.cubin"], capture_output=True, text=True, check=True
    ).stdout


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


def test_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(QtoolError, match=r"pip install 'qtool\[cuda\]'") as error:
        build.toolchain()
    assert "\n" not in str(error.value)
