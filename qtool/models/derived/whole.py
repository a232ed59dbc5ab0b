"""The family of a whole model, made of the families of its blocks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from qtool.errors import QtoolError
from qtool.models.conv1d import FromConv1D
from qtool.models.derived.attention import LOOK_INTO_CACHE
from qtool.models.derived.block_family import block_family
from qtool.models.derived.cached import KVCaches
from qtool.models.derived.disk_names import DiskNames
from qtool.models.derived.entering import entering
from qtool.models.derived.norms import NormForm
from qtool.models.derived.recorded_block import RecordedBlock
from qtool.models.derived.recorded_model import RecordedModel
from qtool.models.family import Family


def whole_family(model: RecordedModel) -> Family:
    """The family of ``model``, with a family for each kind of its blocks.

    Raises:
        QtoolError: no block has a linear that can be quantized.
    """
    on_disk, caches = DiskNames(model), KVCaches(model.recorded)
    firsts: dict[int, Family] = {}
    kinds: dict[Any, Family] = {}
    for number in dict.fromkeys(model.recorded.like):
        block = RecordedBlock(model, f"{model.recorded.blocks}.{number}.")
        family = on_disk.with_mixture(block_family(block, caches.of(number)), number)
        reasons = family.fixed_stream, *family.refuses.items()
        key = block.signature(), family.kv_cache, reasons
        firsts[number] = kinds.setdefault(key, family)
    return _of_blocks(model, on_disk, [firsts[number] for number in model.recorded.like])


def _of_blocks(model: RecordedModel, on_disk: DiskNames, of_block: list[Family]) -> Family:
    """The family of the model, made of the families of its blocks."""
    if not any(family.groups for family in of_block):
        other = next((f"; {n} is not: {why}" for n, why in of_block[0].unquantized.items()), "")
        raise QtoolError(f"its blocks have no linear that can be quantized{other}")
    common = _beside_blocks(model, on_disk)
    enters = _entering(model, common)
    final = model.form(model.final_norm) if model.final_norm else None
    centred = final is not None and final.centred
    common |= {
        "refuses": _refused(model, of_block),
        "fixed_stream": _why_fixed(model, of_block, enters, final),
        "entering": enters or {},
        "layer_norm": centred or any(f.layer_norm for f in of_block),
    }
    own = {id(f): replace(f, **common, norm_offset=f.norm_offset) for f in of_block}
    whole = own[id(next((f for f in of_block if f.experts), of_block[0]))]
    if len(own) == 1:
        return whole
    numbered = [own[id(f)] for f in of_block]
    return replace(whole, choose=lambda config, block: numbered[block])


def _refused(model: RecordedModel, of_block: list[Family]) -> dict[str, str]:
    """Methods that some block does not allow, and why.

    A block that smooth-attention passes over does not keep others from it.
    """
    scaled = [family.kv_cache.k_norm for family in of_block if family.kv_cache]
    refused = {
        method: reason
        for family in of_block
        for method, reason in family.refuses.items()
        if not (method == "smooth-attention" and family.attention is None and any(scaled))
    }
    decoder = model.modules[model.recorded.blocks.rpartition(".")[0]]
    if not isinstance(decoder, PreTrainedModel):
        refused["kv"] = "what holds its blocks is no model, which is given a cache"
    if not any(family.kv_cache for family in of_block):
        none = dict.fromkeys(LOOK_INTO_CACHE, "none of its blocks keeps keys and values in a cache")
        refused = none | refused
    return refused


def _why_fixed(
    model: RecordedModel,
    of_block: list[Family],
    enters: Mapping[str, int] | None,
    final: NormForm | None,
) -> str:
    """Why the residual stream cannot be rotated; empty if it can."""
    for reason in (*(family.fixed_stream for family in of_block), model.why_fixed()):
        if reason:
            return reason
    if enters is None:
        return "pictures or sound enter it by linears that qtool does not know"
    offsets = {family.norm_offset for family in of_block} | ({final.offset} if final else set())
    if len(offsets) > 1:
        return "its norms do not multiply by their weights in one way"
    return ""


def _beside_blocks(model: RecordedModel, on_disk: DiskNames) -> dict[str, Any]:
    """The fields of a family that describe the whole model."""
    final_norm = model.final_norm
    common: dict[str, Any] = {
        "name": type(model.model).__name__.removesuffix("ForCausalLM"),
        "model_types": (model.model.config.model_type,),
        "text": model.recorded.text,
        "embedding": model.recorded.embedding,
        "positions": model.positions,
        "blocks": model.recorded.blocks,
        "final_norm": final_norm if model.is_hidden(f"{final_norm}.weight") else "",
        "final_bias": model.is_hidden(f"{final_norm}.bias"),
        "head": model.recorded.head,
        "sizes": model.sizes,
        "defaults": model.defaults(),
        "returns": model.recorded.outputs,
        "passes": model.recorded.passes,
        "beside_hidden": model.beside_hidden,
        "index_bytes": model.index_bytes,
        "streamed_only": model.recorded.impure,
        "whole_embedding": model.recorded.reads_ids,
        "disk_names": on_disk.names,
        "rows_on_disk": on_disk.rows,
        "ignored": tuple(model.model._keys_to_ignore_on_load_unexpected or ()),
        "transposed": frozenset(
            f"{name}.weight" for name, m in model.modules.items() if isinstance(m, FromConv1D)
        ),
        "other_linears": tuple(
            name
            for name, module in model.modules.items()
            if isinstance(module, nn.Linear)
            and not name.startswith(f"{model.recorded.blocks}.")
            and name != model.recorded.head
        ),
        "integers": frozenset(model.integers),
        "derived": True,
    }
    common["outside"] = _outside(model, common)
    called = set(model.trace.called)
    common["read_of_text"] = tuple(
        name for name in common["outside"] if name.rpartition(".")[0] in called
    )
    return common


def _entering(model: RecordedModel, common: Mapping[str, Any]) -> dict[str, int] | None:
    """What enters the residual stream beside text; None if that is not known."""
    text_alone = model.model.config is model.config
    if text_alone and len(common["read_of_text"]) == len(common["outside"]):
        return {}
    kind = model.model.config.model_type
    return entering(kind, model.modules, common["outside"], model.hidden)


def _outside(model: RecordedModel, common: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors beside blocks, tables, final norm and head, which stay as they are."""
    known = {f"{common[part]}.weight" for part in ("embedding", "positions", "final_norm", "head")}
    known.add(f"{common['final_norm']}.bias")
    blocks = f"{model.recorded.blocks}."
    tied: Mapping[str, str] = model.model.all_tied_weights_keys
    return {
        name: shape
        for name, shape in model.state.items()
        if not name.startswith(blocks) and name not in known | tied.keys()
    }
