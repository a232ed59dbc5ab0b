"""Gradients of the residual stream, found block by block, are those of the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM

from qtool import recipes
from qtool.calibration.batch import Batch, BlockArguments
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.quantize import Calibration, quantize
from qtool.pipeline.streaming import shards, stream_gradients
from tests.conftest import MakeModel
from tests.models.tiny import save_tiny
from tests.pipeline.test_quantize import Killed, kill_at

TOKENS = torch.arange(3 * 20).view(3, 20) * 7 % 320
RECIPE: dict[str, Any] = {
    "scheme": "w4a16",
    "layers": [{"match": ".*", "scheme": "w4a16", "group_size": 32, "layout": "row-major"}],
    "rounding": {"gptq": {"rounds": 0, "clip_steps": 1, "output_hessian": True}},
}


def run(source: Path, out: Path, **options: Any) -> Path:
    data = Calibration(list(TOKENS.split(2)), {"text": "numbers"})
    recipe = recipes.parse(RECIPE, "test")
    return quantize(Checkpoint(source), recipe, out, calibration=data, **options)


def factors(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[Tensor] | None = None
) -> dict[int, Tensor]:
    """F of each block in a run, with the gradients before the final norm given or recorded."""
    found, real = {}, shards.stream_gradients

    def recorded(*given: Any) -> Any:
        for index, factor in real(*given):
            found[index] = factor
            yield index, factor

    monkeypatch.setattr(shards, "stream_gradients", recorded)
    if drawn is not None:
        given = iter(drawn)
        monkeypatch.setattr(stream_gradients, "_before_norm", lambda *_, **__: next(given))
    run(source, out)
    return found


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "mixtral", "qwen2_moe"])
def test_they_are_those_of_the_whole_model(
    family: str, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_gradients, "LONGEST", float("inf"))
    source = make_model(family)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    decoder = model.model.decoder if family == "opt" else model.model
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 20, model.config.hidden_size, generator=random) for _ in TOKENS]
    found = factors(source, tmp_path / "out", monkeypatch, drawn)
    assert found.keys() == set(range(len(decoder.layers)))
    sums = [torch.zeros_like(factor) for factor in found.values()]
    for ids, gradient in zip(TOKENS, drawn, strict=True):
        kept: list[Tensor] = []
        for layer in decoder.layers:
            layer.register_forward_hook(
                lambda _, inputs, out, kept=kept: kept.append(
                    out[0] if isinstance(out, tuple) else out
                )
            )
        model(ids[None], use_cache=False)
        for total, own in zip(sums, torch.autograd.grad(kept[-1], kept, gradient), strict=True):
            unit = normalize(own[0], dim=1)
            total += unit.T @ unit
        for layer in decoder.layers:
            layer._forward_hooks.clear()
    for index, total in enumerate(sums):
        expected = total / total.diagonal().mean()
        expected.diagonal().add_(stream_gradients.DAMPING)
        torch.testing.assert_close(found[index].T @ found[index], expected, rtol=1e-3, atol=1e-3)


def test_directions_of_the_logits_are_those_of_log_probabilities(make_model: MakeModel) -> None:
    """The covariance of the head's rows, each as often as its token occurs."""
    source = Checkpoint(make_model())
    job, text = Job.of(source.config, recipes.parse(RECIPE, "test")), TOKENS.flatten()
    found = stream_gradients._logit_moments(source, job, text, torch.device("cpu"))
    norm = source.read("model.norm.weight").float()
    rows = source.read("lm_head.weight").float() * norm
    torch.testing.assert_close(found, torch.cov(rows[text].T, correction=0), rtol=1e-4, atol=1e-6)


def test_a_direction_along_the_token_does_not_reach_it(make_model: MakeModel) -> None:
    """The final norm takes it out; with LayerNorm also the mean. A zero token is finite."""
    x = torch.randn(1, 5, 8)
    x[0, 2] = 0
    batch = Batch(x, BlockArguments([], []))
    for layer_norm in (False, True):
        random = torch.Generator().manual_seed(0)
        found = stream_gradients._before_norm(batch, torch.eye(8), random, layer_norm=layer_norm)
        assert found.isfinite().all() and found.any()
        centred = x - x.mean(-1, keepdim=True) if layer_norm else x
        assert (found * centred).sum(-1).abs().max() < 1e-4
        assert not layer_norm or found.mean(-1).abs().max() < 1e-5


@pytest.mark.parametrize("tokens", [1, 2, 512])
def test_one_direction_alone_has_a_factor(tokens: int) -> None:
    """Of float32 sums that are its second moments, rounding leaves eigenvalues below zero."""
    random = torch.Generator().manual_seed(1)
    direction, sizes = (torch.randn(n, generator=random) for n in (2048, tokens))
    gradients = [torch.outer(sizes, direction)[None]]
    factor = stream_gradients._factor(stream_gradients._unit_moments(gradients))
    unit = direction / direction.norm()
    assert float((factor @ unit).square().sum()) == pytest.approx(2048, rel=0.02)
    assert float(factor.square().sum()) == pytest.approx(2048, rel=0.02)


def test_a_linear_that_no_gradient_reaches_is_rounded_by_itself(tmp_path: Path) -> None:
    """GLM's indexer runs without gradients: it only chooses tokens."""
    source = save_tiny("glm_moe_dsa", tmp_path / "source")
    out = run(source, tmp_path / "out")
    assert "model.layers.0.self_attn.indexer.wk.qweight" in Checkpoint(out).entries


def test_blocks_without_a_backward_pass_are_rounded_without_it(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    source = make_model()
    whole = run(source, tmp_path / "whole")

    def fails(*_: object) -> None:
        raise RuntimeError("derivative for this is not implemented")

    monkeypatch.setattr(stream_gradients, "with_gradients", fails)
    out = run(source, tmp_path / "out")
    assert "output_hessian is left out: a backward pass through the blocks of Llama" in caplog.text
    plain = RECIPE | {"rounding": {"gptq": {"rounds": 0, "clip_steps": 1}}}
    monkeypatch.setitem(RECIPE, "rounding", plain["rounding"])
    expected = run(source, tmp_path / "plain")
    name = "model.layers.0.mlp.down_proj.qweight"
    stored, without, beside = (Checkpoint(path).read(name) for path in (out, expected, whole))
    assert torch.equal(stored, without) and not torch.equal(stored, beside)


def test_a_resumed_run_has_them_for_the_blocks_that_are_left(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read from disk, where those of written blocks take no room."""
    source = make_model("llama", num_hidden_layers=3)
    whole = run(source, tmp_path / "whole")
    with pytest.raises(Killed):
        run(source, tmp_path / "out", progress=kill_at(3))  # embedding, head and the first block
    left = sorted(path.stem for path in tmp_path.rglob("gradients-*.safetensors"))
    assert left == ["gradients-00001", "gradients-00002"]
    monkeypatch.setattr(shards, "stream_gradients", None)
    out = run(source, tmp_path / "out", resume=True)
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (out / path.name).read_bytes()
