"""Derives a family from config.json alone, by one forward of transformers' own model.

No weight is read. It is a data-flow analysis: the forward runs with weights on ``meta`` and
activations of random numbers, and each of its operations says what its result depends on.

The terms:

- A *producer* makes values: a linear (named by its weight), a norm or a stack of experts (by its
  module), an embedding; the residual stream that enters a block counts as one too.
- A *fact* says how a tensor depends on one producer: on which of its output channels each element
  depends, and of what *kind* this dependence is, from ``LINEAR`` to ``MIXED``, which promises
  nothing (:class:`.facts.Kind`). Each operation keeps a kind or weakens it. The output of a linear
  or a norm begins anew: its fact is ``LINEAR`` in its own channels. (If the norm is not one of the
  residual stream, the producers of its input stay, as ``MIXED``.)
- Channels *escape* where an operation takes them that no rule covers. Then nothing can be folded
  into these channels of their producer.
- Tensors share a *value id* if they hold the same values in the same order. Linears that read one
  value id are a group.
- A *read* is a call of a linear, with the value id and the facts of its input. All reads, norms,
  attentions, additions to the residual stream and escapes are the *trace*.

For example ``down_proj(silu(gate_proj(x)) * up_proj(x))``, the MLP of a Llama:

1. ``aten.mm`` of ``x`` and a transposed parameter: the parameter is ``gate_proj.weight``, so
   :mod:`.products` notes a read of it. In the fact of the result, element c of each token depends
   on channel c of ``gate_proj``, kind ``LINEAR``. The same for ``up_proj``.
2. ``aten.silu`` works on each element alone but is not linear: the fact gets the kind ``ORDERED``.
3. ``aten.mul`` joins the facts of its operands (:mod:`.arithmetic`). For ``up_proj`` the other
   operand is a coefficient of its own for each channel: ``SCALED``. ``gate_proj`` stays
   ``ORDERED``.
4. ``aten.mm`` with ``down_proj.weight`` notes a read, whose input has these two facts:

   >>> from qtool.models.derived.forward import record
   >>> config = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256}
   >>> config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
   >>> reads = record(built(config)).trace.reads
   >>> down = next(read for read in reads if read.weight.endswith("down_proj.weight"))
   >>> for producer, fact in down.facts.items():
   ...     print(producer, fact.kind.name)
   model.layers.0.mlp.gate_proj.weight ORDERED
   model.layers.0.mlp.up_proj.weight SCALED

5. :mod:`.folds` sees one producer up to ``SCALED`` and one ``ORDERED``, both in the order of their
   rows, and that nothing else reads them: no other read, norm or addition to the residual stream,
   and no escape. So a factor on the input folds into ``up_proj``, and a permutation into both:

   >>> *_, group = derive(config).groups
   >>> group.linears, group.fold.name, group.source, group.gate
   (('mlp.down_proj',), 'PRODUCT', 'mlp.up_proj', 'mlp.gate_proj')

The files, in the order of the data: :mod:`.build` makes the model without memory, :mod:`.forward`
runs it (:mod:`.numbers`), :mod:`.calls` follows the calls of its modules and :mod:`.recorder` the
operations, by the rules in :mod:`.moves`, :mod:`.arithmetic` and :mod:`.products`. The record is a
:class:`.recorded_model.RecordedModel` with its :class:`.recorded_block.RecordedBlock`. From it
:mod:`.linears`, :mod:`.folds`, :mod:`.attention` and :mod:`.stream` prove the statements of
:mod:`.block_family`; :mod:`.whole` puts the blocks together. :mod:`.fused` finds the parts of fused
linears, :mod:`.passing` follows what blocks hand on besides hidden states, :mod:`.cached` sees in a
second forward what they give to a KV cache, and :mod:`.on_disk` and :mod:`.disk_names` have the
names in checkpoints. :mod:`.entering` lists by which linears pictures and sound enter, which a
forward of text does not show. :mod:`.norms`, :mod:`.module_kinds` and :mod:`.expert_gates` find
what a single module computes.

A statement that is not proved is left out: ``unquantized`` of :class:`~qtool.models.family.Family`
says why a linear stays in 16 bits, ``refuses`` and ``fixed_stream`` say why a transform is left
out.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from qtool.errors import QtoolError
from qtool.models.derived.build import build
from qtool.models.derived.forward import record
from qtool.models.derived.recorded_model import RecordedModel
from qtool.models.derived.whole import whole_family
from qtool.models.family import Family
from qtool.models.torch_defaults import torch_defaults
from qtool.strict_json import number

#: keys of a config.json that say nothing of the model's structure
BESIDE_STRUCTURE = ("quantization_config", "_name_or_path", "auto_map")


def derive(config: Mapping[str, Any]) -> Family:
    """The family of the model of a config.json, at its sizes.

    Raises:
        QtoolError: transformers cannot build it, or its forward has no blocks that can be followed.
    """
    return _derived(_text(config))


def built(config: Mapping[str, Any]) -> Any:
    """transformers' model of a config.json, without numbers.

    Raises:
        QtoolError: transformers cannot build it.
    """
    return _built(_text(config))


def _text(config: Mapping[str, Any]) -> str:
    """``config`` as JSON, without :data:`BESIDE_STRUCTURE`."""
    plain = {k: v for k, v in config.items() if k not in BESIDE_STRUCTURE}
    return json.dumps(plain, sort_keys=True, default=str)


def _built(config: str) -> Any:
    with torch_defaults():
        return build(json.loads(config, object_hook=number))


@lru_cache(maxsize=8)
def _derived(config: str) -> Family:
    try:
        with torch_defaults():
            return whole_family(RecordedModel(record(_built(config))))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise QtoolError(f"its structure is not understood ({error})") from error
