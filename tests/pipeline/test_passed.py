"""What blocks hand on beside the hidden states: each gets, on both paths, on disk and in parts,
what transformers' own forward gives it.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from qtool import recipes
from qtool.calibration import forwards
from qtool.calibration.batch import Batch, first_inputs
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.io.safetensors import read_header
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.auto import auto_class, text_model
from qtool.models.passed import as_arguments, handed_on
from qtool.models.skeleton import bound_arguments
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import activation_bytes
from qtool.pipeline.quantize import Calibration, quantize
from qtool.pipeline.streaming import snapshots
from qtool.pipeline.streaming.activations import PLACES, HostBatch
from qtool.runtime.load import load
from tests.models.tiny import save_tiny
from tests.pipeline.test_quantize import Killed, files

TOKENS = torch.randint(3, 320, (4, 24), generator=torch.Generator().manual_seed(3))
#: numbers that a router adds, indices that a mask is made of, keys and values in a mapping, both
TYPES = ("zaya", "glm_moe_dsa", "gemma4_text", "mistral_large4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny random model, which no test changes."""
    made: dict[str, Path] = {}

    def save(model_type: str) -> Path:
        if model_type not in CONFIG_MAPPING:
            pytest.skip(f"this transformers has no {model_type}")
        if model_type not in made:
            directory = tmp_path_factory.mktemp("saved") / model_type
            made[model_type] = save_tiny(model_type, directory)
        return made[model_type]

    return save


LAYERS = [{"match": ".*", "scheme": "w4a16", "group_size": 64}]
RECIPE = recipes.parse({"layers": LAYERS, "rounding": {"gptq": {"rounds": 0}}}, "mine")


def run(source: Path, out: Path, **options: Any) -> Path:
    calibration = Calibration(list(TOKENS.split(2)), {"text": "random"})
    return quantize(Checkpoint(source), RECIPE, out, calibration=calibration, **options)


@torch.no_grad()
def inputs_of_blocks(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """What transformers' own forward gives each block that earlier ones made, by name."""
    family, seen = family_of(model.config), []

    def see(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, *others = bound_arguments(inspect.signature(block.forward), args, kwargs).items()
        found = {"hidden": hidden[1]}
        for name, value in others:
            if name not in family.passes or value is None:
                continue
            if isinstance(value, Mapping):
                parts = {(key, i): t for key, pair in value.items() for i, t in enumerate(pair)}
                found |= {f"{name}.{key}.{i}": tensor for (key, i), tensor in parts.items()}
            else:
                found[name] = value
        seen.append(found)

    for block in model.get_submodule(family.blocks):  # type: ignore[union-attr]
        block.register_forward_pre_hook(see, with_kwargs=True)
    text_model(model)(input_ids=TOKENS, use_cache=False)
    return seen


def joined(batches: list[Batch]) -> dict[str, Tensor]:
    """What enters a block, of all batches."""
    found = [batch.tensors for batch in batches]
    assert all(t.is_contiguous() for one in found for t in one.values()), "laid out as on disk"
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal up to the order of sums; of indices, a few may be next to the last that is chosen."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)
        else:
            assert (tensor == expected[name]).float().mean() > 0.95


@pytest.mark.parametrize("model_type", TYPES)
def test_a_block_gets_what_transformers_gives_it(
    model_type: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the float model on one path, of the quantized model on the other."""
    source, seen = saved(model_type), []

    def spy(self, block, batches):  # type: ignore[no-untyped-def]
        references = [block.reference.batches[id(batch)] for batch in batches]
        seen.append((joined(references), joined(batches)))
        return rounded(self, block, batches)

    rounded = Gptq.round
    monkeypatch.setattr(Gptq, "round", spy)
    out = run(source, tmp_path / "out")
    exact, made = inputs_of_blocks(load(source)), inputs_of_blocks(load(out))
    assert all(len(inputs) > 1 for inputs in exact[2:])
    for (reference, quantized), of_float, of_result in zip(seen, exact, made, strict=True):
        assert_same(reference, of_float)
        assert_same(quantized, of_result)


def test_a_mapping_by_numbers_of_blocks_or_by_their_kinds_comes_back() -> None:
    keys, values = torch.zeros(1), torch.ones(1)
    given = {"shared": {0: (keys, values), "full_attention": (values, keys)}}
    assert as_arguments(handed_on((), given, {"shared": 0}), {"shared": 0}) == given


def test_a_mapping_of_long_tuples_comes_back_in_order() -> None:
    tensors = tuple(torch.tensor(float(number)) for number in range(12))
    passed = handed_on((), {"shared": {"full": tensors}}, {"shared": 0})
    assert as_arguments(passed, {"shared": 0}) == {"shared": {"full": tensors}}


@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_resumed_run_finds_it_on_disk(
    model_type: str,
    place: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "ALLOWANCE", float("inf"))
    source = saved(model_type)
    whole = files(run(source, tmp_path / "whole"))

    def kill(self, block, batches):  # type: ignore[no-untyped-def]
        if block.index == 2:
            raise Killed
        return rounded(self, block, batches)

    rounded = Gptq.round
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Gptq, "round", kill)
        run(source, tmp_path / "out", activations=place)
    kept = max((tmp_path / "out.partial" / ".run").glob("activations-*.safetensors"))
    names = {name.split(".", 2)[2] for name in read_header(kept)}
    assert "hidden" in names and len(names) > 1
    assert files(run(source, tmp_path / "out", activations=place, resume=True)) == whole


@pytest.mark.cuda
@pytest.mark.parametrize("model_type", TYPES)
def test_every_place_of_a_gpu_gives_the_same(
    model_type: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 16 bits: on the device, in pinned memory and in files, however late a copy is there."""

    def late(batch: HostBatch, name: str, tensor: Tensor, stored: Any = HostBatch.stored) -> Tensor:
        torch.cuda._sleep(10**7)  # cycles of a GPU: some milliseconds
        return stored(batch, name, tensor)

    monkeypatch.setattr(HostBatch, "stored", late)
    kind = auto_class(AutoConfig.from_pretrained(saved(model_type)))
    model = kind.from_pretrained(saved(model_type), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    first, *others = (
        files(run(tmp_path / "source", tmp_path / place, device="cuda", activations=place))
        for place in PLACES
    )
    assert all(found == first for found in others)


@pytest.mark.parametrize("model_type", (*TYPES, "hy_v4", "gemma3n_text"))
def test_a_block_run_in_halves_hands_on_the_same_and_as_much_as_is_planned(
    model_type: str, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved(model_type))
    family = family_of(model.config)
    whole = inputs_of_blocks(model)
    batches, held = first_inputs(model, family, [TOKENS]), []
    forward = forwards._forward

    def small(block: Any, batch: Batch, **extra: Any) -> dict[str, Tensor]:
        if batch.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(block, batch, **extra)

    monkeypatch.setattr(forwards, "_forward", small)
    config = family.settings(model.config.to_dict())
    for index, module in enumerate(model.get_submodule(family.blocks)):  # type: ignore[arg-type]
        assert_same(batches[0].tensors, whole[index])
        held.append(sum(tensor.nbytes for tensor in batches[0].tensors.values()))
        block = forwards.Block(index, module, family.at(config, index), config, {})
        forwards.propagate(block, batches)
    job, (count, length) = Job.of(model.config.to_dict(), RECIPE), TOKENS.shape
    planned = activation_bytes(job, count * length, length, torch.device("cpu"))
    chosen = getattr(model.config.get_text_config(), "index_topk", length)
    assert planned - 2 * count * length * family.index_bytes * (length - chosen) == 2 * max(held)
