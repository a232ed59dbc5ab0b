"""Every kernel compiles without a GPU, and the compiler's report and machine code are what they must be."""

import subprocess
from pathlib import Path

import pytest
import torch

from qtool.errors import QtoolError
from qtool.kernels import build
from qtool.kernels.bench import operand_of
from qtool.kernels.gemm import THREADS, definition
from qtool.kernels.quantize_activation import FUSIONS
from qtool.kernels.quantize_activation import definition as quantize_definition
from qtool.kernels.tiles import TABLE, Tile

#: one scheme with every tile, the others with the widest and the narrowest
OTHERS = [("w4a8-lqq", 32), ("w4a8-lqq", 128), ("w4a8-qoq-g128", 128), ("w4a8-qoq", None), ("w8a8", None)]
KERNELS = [("w4a8-lqq", 64, tile) for tile in TABLE]
KERNELS += [(*other, tile) for other in OTHERS for tile in (Tile(256), Tile(8, split=8))]
TINY = 'extern "C" __global__ void tiny(int* p) { *p = VALUE; }'


@pytest.fixture
def toolchain() -> None:
    pytest.importorskip("cuda.core", reason="the [cuda] extra is not installed")
    try:
        build.toolchain()
    except QtoolError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(("scheme", "group", "tile"), KERNELS, ids=str)
def test_compiles_without_spills(scheme: str, group: int | None, tile: Tile, tmp_path: Path) -> None:
    compiled = build.compile_source(*definition(operand_of(scheme, group), tile, torch.bfloat16), "sm_90a")
    assert compiled.local_bytes == 0
    assert not compiled.serialized, compiled.log
    assert compiled.registers * THREADS * tile.blocks_per_sm <= 65536
    sass = disassemble(compiled.cubin, tmp_path)
    assert sass is None or f"IGMMA.64x{tile.tokens}x32." in sass
    assert sass is None or ("LDL" not in sass and "STL" not in sass)


@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("k", [64, 4096, 28672])
def test_activation_quantization_compiles_without_spills(k: int, fusion: str) -> None:
    source = quantize_definition(k, torch.bfloat16, fusion, gather=True)
    compiled = build.compile_source(*source, "sm_90")
    assert compiled.local_bytes == 0
    assert compiled.registers * source[2]["THREADS"] <= 65536


def disassemble(cubin: bytes, folder: Path) -> str | None:
    """SASS text, or ``None`` where nvdisasm is not installed."""
    try:
        import nvidia
    except ImportError:
        return None
    tools = [p for root in nvidia.__path__ for p in Path(root).glob("*/bin/nvdisasm")]
    if not tools:
        return None
    (folder / "k.cubin").write_bytes(cubin)
    return subprocess.run([tools[0], "-c", folder / "k.cubin"], capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("toolchain")
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
