"""The float model beside the quantized path, which GPTQ looks at: what it computes, and that a
resumed run finds it.
"""

from pathlib import Path

import pytest
import torch

from qtool import recipes
from qtool.calibration.rounding.gptq import memory
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.load import load
from tests.conftest import MakeModel
from tests.pipeline.test_quantize import Killed, files, kill_at

TOKENS = torch.randint(0, 320, (4, 32), generator=torch.Generator().manual_seed(3))


def run(source: Path, out: Path, kv: str | None = None, **options: object) -> Path:
    layers = [{"match": ".*", "scheme": "w8a8", "group_size": "channel"}]
    keys = {"smooth-attention": {"steps": 2, "starts": 2}}
    transforms = ["norm-fusion", {"smooth": {"steps": 2}}, "online-hadamard"]
    transforms += [keys] if kv else []
    recipe = recipes.parse(
        {"layers": layers, "transforms": transforms, "rounding": "gptq", "kv": kv}, "mine"
    )
    return quantize(
        Checkpoint(source), recipe, out, calibration=Calibration(TOKENS.split(2)), **options
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", (None, "kv4"))
def test_it_is_what_the_float_model_computes(
    kv: str | None, make_model: MakeModel, tmp_path: Path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    source = make_model(num_hidden_layers=3)
    exact = load(source)(TOKENS, output_hidden_states=True).hidden_states
    seen = []

    def spy(self, block, batches):  # type: ignore[no-untyped-def]
        references = [block.reference.batches[id(batch)].hidden for batch in batches]
        torch.testing.assert_close(torch.cat(references), exact[block.index], rtol=1e-4, atol=1e-4)
        drifted = torch.cat([batch.hidden for batch in batches])
        assert torch.equal(drifted, torch.cat(references)) == (block.index == 0)
        seen.append(block.index)
        return rounded(self, block, batches)

    rounded = Gptq.round
    monkeypatch.setattr(Gptq, "round", spy)
    run(source, tmp_path / "out", kv)
    assert seen == [0, 1, 2]


def test_a_resumed_run_finds_it_again(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(num_hidden_layers=3, dtype=torch.bfloat16)
    whole = run(source, tmp_path / "whole", "kv4")
    for stop in (2, 3, 4):
        out = tmp_path / f"cut-{stop}"
        with pytest.raises(Killed):
            run(source, out, "kv4", progress=kill_at(stop))
        cut = run(source, out, "kv4", resume=True)
        assert files(cut) == files(whole)


@pytest.mark.parametrize("most", [0, 1 << 30])
@pytest.mark.parametrize("variant", ["llama", "falcon", "mixtral"])
def test_outputs_that_overwrite_the_inputs_change_nothing(
    variant: str, most: int, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files: the last dense linear of a mixture is compared at the block's own input."""
    monkeypatch.setattr(memory, "MOST_INPUT_BYTES", most)
    source = make_model(variant, num_hidden_layers=3)
    first, *others = (
        files(run(source, tmp_path / place, activations=place)) for place in ("device", "disk")
    )
    assert others == [first]


def test_a_block_is_calibrated_on_what_the_quantized_ones_before_compute(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their caches: the inputs are those of the finished model, not of the float one."""
    source, seen = make_model(num_hidden_layers=3), []

    def spy(self, block, batches):  # type: ignore[no-untyped-def]
        seen.append(torch.cat([batch.hidden for batch in batches]).clone())
        return rounded(self, block, batches)

    rounded = Gptq.round
    monkeypatch.setattr(Gptq, "round", spy)
    out = run(source, tmp_path / "out", "kv4")
    with torch.no_grad():
        exact, made = (load(m)(TOKENS, output_hidden_states=True) for m in (source, out))
    for inputs, float_inputs, own in list(
        zip(seen, exact.hidden_states, made.hidden_states, strict=False)
    )[1:]:
        # of a token: the last bit of a sum may tip a code of the cache, and the tokens after it
        off, drift = ((x - own).norm(dim=-1).median() for x in (inputs, float_inputs))
        assert off < 0.01 * drift
