"""A block whose batch does not fit the device runs it in halves, with the same outputs."""

import pytest
import torch
from transformers import LlamaConfig

from qtool.calibration.block import Batch, Block, first_inputs
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.models.skeleton import fill, skeleton
from tests.conftest import SMALL


@pytest.fixture
def block_and_batch() -> tuple[Block, Batch]:
    torch.manual_seed(0)
    config, family = LlamaConfig(**SMALL), family_of("llama")
    model = skeleton(config)
    embedding = model.get_input_embeddings()
    fill(embedding, {"weight": torch.randn(embedding.weight.shape)}, torch.device("cpu"))
    module = model.get_submodule(family.blocks)[0]
    fill(module, {n: torch.randn(p.shape) / 8 for n, p in module.named_parameters()}, torch.device("cpu"))
    (batch,) = first_inputs(model, family, [torch.randint(0, 320, (4, 16))])
    return Block(0, module, family, config, {}), batch


def limit(block: Block, sequences: int) -> None:
    def refuse(_, args) -> None:  # type: ignore[no-untyped-def]
        if len(args[0]) > sequences:
            raise torch.OutOfMemoryError("CUDA out of memory")

    block.module.register_forward_pre_hook(refuse)


def test_halves_give_the_same_outputs(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch
    whole = block.run(batch)
    limit(block, 1)
    assert torch.allclose(block.run(batch), whole, atol=1e-6)
    assert block.notes["batches halved for lack of memory"] == 3


def test_halves_show_all_inputs(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch
    linear = "mlp.up_proj"
    whole = block.inputs(batch, linear)
    limit(block, 1)
    assert whole is not None and torch.allclose(block.inputs(batch, linear), whole, atol=1e-6)  # type: ignore[arg-type]
    seen: list[torch.Tensor] = []
    block.observe([batch], {linear: seen.append})
    assert torch.allclose(torch.cat(seen), whole, atol=1e-6)


def test_one_sequence_that_does_not_fit_is_said(block_and_batch: tuple[Block, Batch]) -> None:
    block, batch = block_and_batch
    limit(block, 0)
    with pytest.raises(QtoolError, match="block 0: one sequence of 16 tokens does not fit"):
        block.run(batch)
