"""What ``qtool bench serve`` asks each engine, and how its rows read."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from qtool.cli import cli
from qtool.errors import QtoolError
from qtool.io.model_directory import DEMO
from qtool.serving import bench
from tests.serving.conftest import Native

ROW = {"step_ms": 4.0, "prefill": 1000.0, "request": 50.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What engines were asked, each with its model's config.json; they answer at once."""
    seen: list[dict[str, Any]] = []

    def measure(name: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        config = json.loads(Path(request["model"], "config.json").read_text())
        seen.append({"name": name, "config": config} | request)
        return [{"batch": batch} | ROW | {"step_ms": 2.0 * len(seen)} for batch in (1, 16)]

    monkeypatch.setattr(bench, "_measure_elsewhere", measure)
    monkeypatch.setattr(bench, "require_vllm", lambda directory, count: None)
    return seen


def test_every_engine_has_the_same_shape(native: Native, asked: list[dict[str, Any]]) -> None:
    directory = native()
    command = ["bench", "serve", str(directory), "--batches", "1,16", "--tensor-parallel", "2"]
    command += ["--memory", "80"]
    done = CliRunner().invoke(cli, [*command, "--json"])
    rows = json.loads(done.output)
    ours, *baselines = asked
    assert ours["model"] == str(directory) and ours["batches"] == [1, 16]
    assert [engine["name"] for engine in baselines] == ["fp8", "bf16", "w4a16"]
    stored = ours["config"].pop("quantization_config")
    for engine in baselines:
        method = engine["config"].pop("quantization_config", {}).get("quant_method")
        assert method == ("compressed-tensors" if engine["name"] == "w4a16" else None)
        assert engine["config"] == ours["config"]
        assert engine["options"]["load_format"] == "dummy"
    assert all(engine["options"]["tensor_parallel_size"] == 2 for engine in asked)
    assert all(engine["memory"] == 80 for engine in asked)
    assert {row["engine"] for row in rows} == {f"qtool {stored['scheme']}", "fp8", "bf16", "w4a16"}
    text = CliRunner().invoke(cli, [*command, "--against", "fp8"]).output
    assert "over qtool w4a8-lqq" in text and "bf16" not in text


def test_a_checkpoint_with_a_quantized_cache_keeps_it(
    native: Native, asked: list[dict[str, Any]]
) -> None:
    rows = list(bench.bench_serve(native(kv="kv4"), against=["fp8"]))
    assert [engine["options"]["kv_cache_dtype"] for engine in asked] == ["auto", "fp8"]
    assert {row.engine for row in rows} == {"qtool w4a8-lqq kv4", "fp8"}


def test_a_cache_that_vllm_cannot_use_is_neither_named_nor_asked_for(
    native: Native, asked: list[dict[str, Any]]
) -> None:
    rows = list(bench.bench_serve(native(kv="kv4-channel"), against=["fp8"]))
    assert [engine["options"]["kv_cache_dtype"] for engine in asked] == ["fp8", "fp8"]
    assert {row.engine for row in rows} == {"qtool w4a8-lqq", "fp8"}


def test_a_baseline_that_is_named_twice_is_measured_once(
    native: Native, asked: list[dict[str, Any]]
) -> None:
    assert list(bench.bench_serve(native(), against=["fp8", "fp8"]))
    assert [engine["name"] for engine in asked] == ["qtool w4a8-lqq", "fp8"]


def test_wrong_names_and_models_are_refused(native: Native) -> None:
    with pytest.raises(QtoolError, match="--against fp9: "):
        list(bench.bench_serve(native(), against=["fp9"]))
    with pytest.raises(QtoolError, match="the model is not quantized"):
        list(bench.bench_serve(DEMO))


def test_a_baseline_that_does_not_start_is_left_out(
    native: Native, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(name: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        if name == broken:
            raise QtoolError(f"{name}: vLLM stopped with status 1")
        return [{"batch": 1} | ROW]

    monkeypatch.setattr(bench, "_measure_elsewhere", measure)
    monkeypatch.setattr(bench, "require_vllm", lambda directory, count: None)
    broken, directory = "fp8", native()
    rows = list(bench.bench_serve(directory, against=["fp8", "bf16"]))
    assert {row.engine for row in rows} == {"qtool w4a8-lqq", "bf16"}
    assert [record.message for record in caplog.records] == ["fp8: vLLM stopped with status 1"]
    broken = "qtool w4a8-lqq"
    with pytest.raises(QtoolError, match=broken):
        list(bench.bench_serve(directory, against=["fp8"]))


def test_short_runs_are_repeated_and_long_ones_are_not() -> None:
    short, long = iter([3.0, 1.0, 2.0]), iter([bench.PATIENCE, 1.0])
    assert bench.least(lambda: next(short), 3) == 1
    assert bench.least(lambda: next(long), 3) == bench.PATIENCE


def test_a_batch_that_only_a_baseline_has_room_for_stands_in_the_table() -> None:
    ours, other = (
        bench.Served(name, batch, 4.0, 10.0, 5.0) for name, batch in (("q", 1), ("b", 2))
    )
    assert bench.table([ours, other]).splitlines()[-1].split()[:4] == ["b", "2", "4.00", "-"]


def test_no_batch_that_any_engine_has_room_for(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_measure_elsewhere", lambda *_: [])
    monkeypatch.setattr(bench, "require_vllm", lambda directory, count: None)
    with pytest.raises(QtoolError, match="no engine has room for any of them"):
        bench.bench_model(str(native()), against=["fp8"], batches=["1"], memory=None)
    with pytest.raises(QtoolError, match="positive numbers"):
        bench.bench_model(str(native()), against=["fp8"], batches=["²"], memory=None)


def test_an_engine_that_stops_is_named() -> None:
    said = r"^fp8: vLLM stopped with status 1; its messages above say why"
    with pytest.raises(QtoolError, match=said):
        bench._measure_elsewhere("fp8", {"model": "nowhere"})
