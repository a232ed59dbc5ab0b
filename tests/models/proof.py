"""What a quantized model must be, whatever its class: proved on a tiny random one.

Each proof raises an AssertionError, or what qtool or transformers raise.
"""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, CompressedTensorsConfig, PreTrainedModel

import qtool
from qtool import recipes
from qtool.calibration.block import Block
from qtool.calibration.transforms.folding import fold_factor, per_kv_head
from qtool.calibration.transforms.smooth import Smooth
from qtool.io.source import Checkpoint
from qtool.models import Family, family_of
from qtool.models.auto import auto_class, text_model
from qtool.models.describe import kinds_of_blocks
from qtool.models.experts import expert_tensors, is_experts
from qtool.models.parts import Fold
from qtool.pipeline import quantize as pipeline
from qtool.pipeline.quantize import Calibration
from qtool.runtime.huggingface import quantized_linears
from tests.models.tiny import save_tiny

RECIPES = ("fast", "paper", "best")
#: calibration windows and their tokens
WINDOWS = 2, 16
#: norm of a difference between logits over the norm of the logits, in float32
TOLERANCE = 1e-3
#: norm of the error of a row or column of a weight over its norm, rounded to 4 bits
ROUNDING = 0.7


def check(
    model_type: str, work: Path, recipe: str = "fast", scheme: str = "w4a16"
) -> dict[str, Any]:
    """Quantize a tiny model of ``model_type`` and hold it against transformers' own class."""
    source = save_tiny(model_type, work / "source")
    return quantized_right(source, work / "out", recipe, scheme)


@torch.no_grad()
def quantized_right(
    source: Path, out: Path, recipe: str = "fast", scheme: str = "w4a16"
) -> dict[str, Any]:
    """Quantize ``source`` into ``out``, verify the result and load it.

    Every tensor of the source is in it, packed or, where nothing is transformed, equal; its logits
    are those of transformers' own model with the dequantized weights. These are near the source's
    where nothing is transformed; :func:`transforms_keep_logits` is about what is.
    """
    quantize(source, out, recipe, scheme)
    problems = [row for row in qtool.verify(out) if row.problem]
    assert not problems, f"verify: {problems[0].name}: {problems[0].problem}"
    checkpoint, family = Checkpoint(source), family_of(Checkpoint(source).config)
    assert_nothing_dropped(family, checkpoint, Checkpoint(out), equal=recipe == "fast")
    loaded = qtool.load(out)
    linears = quantized_linears(loaded)
    assert linears, "no linear is quantized"
    plain, twin = qtool.load(source), float_twin(loaded, source)
    if not recipes.load(scheme, recipe).transforms:
        assert_own_weights(twin, plain)
    found, expected, unrounded = (logits(model) for model in (loaded, twin, plain))
    error = distance(found, expected)
    assert error < TOLERANCE, f"logits: {error:.1e} from those of the dequantized weights"
    moved = distance(found, unrounded)
    if recipe == "fast":
        assert moved > 5 * TOLERANCE, f"rounding moves logits by {moved:.1e}: they show no fault"
    kinds = kinds_of_blocks(family, checkpoint.config)
    kept = {name: why for kind in kinds for name, why in kind.unquantized.items()}
    return {"quantized": len(linears), "kept": kept, "moved": moved}


def quantize(
    source: Path,
    out: Path,
    recipe: str,
    scheme: str = "w4a16",
    progress: Callable[..., Any] | None = None,
    resume: bool = False,
    device: str = "cpu",
    kv: str | None = None,
) -> None:
    """``qtool.quantize``, calibrated on :func:`windows`."""
    samples, seqlen = WINDOWS
    reads_no_text = recipe == "fast" and kv != "kv8"
    sizes: Any = {} if reads_no_text else {"samples": samples, "seqlen": seqlen}
    calibration = None if reads_no_text else windows(source)
    options = {"progress": progress, "resume": resume, "device": device, "kv": kv, **sizes}
    qtool.quantize(source, scheme, recipe=recipe, calibration=calibration, out=out, **options)


def windows(source: Path) -> Tensor:
    """A few short windows of random tokens, ``[samples, seqlen]``."""
    vocabulary = int(AutoConfig.from_pretrained(source).get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, WINDOWS, generator=generator)


@torch.no_grad()
def transforms_keep_logits(source: Path, out: Path, scheme: str = "w4a16") -> None:
    """What ``best`` does to a model before it rounds leaves the function as it was.

    Each group gets a random smoothing factor, since nothing is searched where nothing is rounded.
    """
    best = recipes.load(scheme, "best")
    layers = tuple(replace(rule, scheme=None, layout=None) for rule in best.layers)
    rounding = recipes.load(scheme, "fast").rounding
    recipe = replace(best, variant="transforms", layers=layers, rounding=rounding)
    text = Calibration([windows(source)])
    with patch.object(Smooth, "apply", smooth_randomly):
        pipeline.quantize(Checkpoint(source), recipe, out, calibration=text)
    error = distance(logits(qtool.load(out)), logits(qtool.load(source)))
    assert error < TOLERANCE, f"logits moved by {error:.1e}"


def smooth_randomly(_: Smooth, block: Block, batches: object) -> None:
    """Fold a random factor into each group of linears that may have one."""
    random = torch.Generator().manual_seed(block.index)
    for group in [group for group in block.family.folds() if group.fold.value in Smooth.groups]:
        factor = 0.5 + torch.rand(block.weight(group.linears[0]).shape[1], generator=random)
        if group.fold is Fold.HEADS:
            factor = per_kv_head(factor, block.heads)
        fold_factor(block, group, factor)


@torch.no_grad()
def exported_right(native: Path, out: Path, *, dequantize: bool = True) -> None:
    """transformers and compressed-tensors load an export, and compute what the native model does.

    Every tensor of it is in the file, and none more; packed, if not to ``dequantize``.
    """
    notes = qtool.export(native, "compressed-tensors", out).notes
    refused = [note for note in notes if "transformers does not" in note]
    assert not refused, refused[0]
    config = AutoConfig.from_pretrained(out)
    how: Any = {"experts_implementation": "eager", "output_loading_info": True}
    if dequantize:
        how["quantization_config"] = CompressedTensorsConfig(dequantize=True)  # type: ignore[no-untyped-call]
    loaded, info = auto_class(config).from_pretrained(out, **how)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], f"{kind} {min(map(str, info[kind]))}"
    error = distance(logits(loaded.eval()), logits(qtool.load(native)))
    assert error < TOLERANCE, f"logits of the export: {error:.1e} from those of the native model"


def resumes(
    source: Path, out: Path, whole: Path, recipe: str = "paper", kv: str | None = None
) -> None:
    """A run killed after its second shard, and resumed, ends at the bytes of ``whole``."""

    def kill(done: int, *_: Any) -> None:
        if done >= 2:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            quantize(source, out, recipe, progress=kill, kv=kv)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the run that was to be killed ended"
    assert not out.exists()
    quantize(source, out, recipe, resume=True, kv=kv)
    for path in sorted(whole.glob("*.safetensors")):
        assert (out / path.name).read_bytes() == path.read_bytes(), f"{path.name} differs"
    shutil.rmtree(out)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Of a few tokens, ``[1, 12, V]``."""
    ids = torch.arange(3, 15, device=model.device)[None]
    found: Tensor = text_model(model)(input_ids=ids, use_cache=False).logits.cpu()
    never = found == torch.finfo(found.dtype).min  # tokens that Chameleon does not give
    return found.float().masked_fill(never, 0)


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``."""
    assert bool(found.isfinite().all()), "logits are not finite"
    return float((found - expected).norm() / expected.norm())


def typical_distance(found: Tensor, expected: Tensor) -> float:
    """The distance of the token in the middle.

    A sum in another order may send a token whose router is undecided to other experts.
    """
    found, expected = found.float(), expected.float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def float_twin(quantized: PreTrainedModel, source: Path) -> PreTrainedModel:
    """transformers' own model of ``source`` with all weights of ``quantized``, dequantized."""
    config = AutoConfig.from_pretrained(source)
    tied = bool(getattr(quantized.config, "tie_word_embeddings", False))
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    model = auto_class(config).from_pretrained(source, config=config)
    family = family_of(quantized.config)
    places = dict(model.state_dict(keep_vars=False))
    for name, module in model.named_modules():
        if is_separated(family, name) and is_experts(module):
            for part in [n for n, _ in module.named_parameters(recurse=False)]:
                del places[f"{name}.{part}"]
            assert family.experts
            for number, tensors in enumerate(expert_tensors(module)):
                for part, view in tensors.items():
                    role, kind = part.split(".")
                    places[f"{name}.{number}.{family.experts.roles[role]}.{kind}"] = view
    left = set(places)
    for name, tensor in weights(quantized).items():
        own = name
        if family.experts and f".{family.experts.moe}." in name and name not in places:
            own = name.replace(f".{family.experts.moe}.", f".{family.experts.attribute}.")
        places[own].copy_(tensor.T if own in family.transposed else tensor)
        left.discard(own)
    assert not left, f"{min(left)} of transformers' model is nowhere in the quantized one"
    return model.eval()


def assert_own_weights(rounded: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Rows and columns of each weight of ``rounded`` are near those of ``plain``; others are equal.

    Rounding to the nearest of 4 bits moves a row or column by 0.2 of its norm at most, GPTQ by 0.5;
    another one in its place is 1.4 of its norm away.
    """
    expected = plain.state_dict()
    for name, tensor in rounded.state_dict().items():
        own = expected[name]
        if not torch.equal(tensor, own):
            assert tensor.dim() > 1, f"{name} is changed"
            error = max(
                float(((tensor - own).norm(dim=dim) / own.norm(dim=dim)).max()) for dim in (-1, -2)
            )
            assert error < ROUNDING, f"{name}: a row or column is {error:.1e} from the source's"


def is_separated(family: Family, name: str) -> bool:
    """Whether ``name`` is that of the stacks that are quantized, which a family has one of."""
    return (
        family.experts is not None
        and name.startswith(f"{family.blocks}.")
        and name.endswith(f".{family.experts.attribute}.experts".replace("..", "."))
    )


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state of ``model``, packed linears dequantized."""
    packed = quantized_linears(model)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] not in packed
    }
    for name, linear in packed.items():
        state[f"{name}.weight"] = linear.dequantize()
        if linear.bias is not None:
            state[f"{name}.bias"] = linear.bias
    return state


def assert_nothing_dropped(
    family: Family, source: Checkpoint, result: Checkpoint, *, equal: bool
) -> None:
    """Every tensor of ``source`` is in ``result``, packed or (if ``equal``) with its numbers."""
    own = dict((disk, name) for name, disk in family.disk_names.items())
    packed = {name.rpartition(".")[0] for name in result.entries if name.endswith(".qweight")}
    taken_apart = {part.name for parts in family.rows_on_disk.values() for part in parts}
    theirs = qtool.load(source.directory).state_dict() if taken_apart else {}
    for name in family.rows_on_disk:
        owner = name.rpartition(".")[0]
        stacked = any(p.startswith(f"{owner}.") for p in packed)
        assert name in result or owner in packed or stacked, f"{name} is dropped"
        if equal and name in result:
            assert torch.equal(result.read(name), theirs[name]), f"{name} is changed"
    for disk in source.entries.keys() - taken_apart:
        parts = disk.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        prefix = next((p for p in prefixes if p in own), None)
        name = disk if prefix is None else own[prefix] + disk[len(prefix) :]
        if name in result:
            if equal:
                stored = source.read(disk)
                stored = stored.T if name in family.transposed else stored
                assert torch.equal(result.read(name), stored), f"{disk} is changed"
        else:
            owner = name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name
            stacked = any(p.startswith(f"{name.rpartition('.')[0]}.") for p in packed)
            assert owner in packed or stacked, f"{disk} is dropped"
