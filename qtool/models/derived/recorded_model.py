"""A recorded model: its modules, shapes and sizes, and properties of all its blocks."""

from collections.abc import Callable
from functools import cached_property, partial
from math import prod
from typing import Any

from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.models.derived.expert_gates import gate_facts
from qtool.models.derived.facts import STREAM, Kind, is_stream
from qtool.models.derived.norms import NormForm, form_of
from qtool.models.derived.on_disk import leaf_names
from qtool.models.derived.recorded import SHAPE, Recorded
from qtool.models.experts import is_experts
from qtool.models.parts import Fold, Heads

#: transformers' common names of sizes that a config may have under other names
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "intermediate_size", "max_position_embeddings"),
    *("num_experts_per_tok", "multi_query", "partial_rotary_factor", "rope_parameters"),
)


class RecordedModel:
    """A recorded model."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self.trace, self.model = recorded, recorded.trace, recorded.model
        self.config = recorded.config
        self.modules = dict(self.model.named_modules())
        state = self.model.state_dict()
        self.state = {name: tuple(t.shape) for name, t in state.items()}
        self.integers = [name for name, t in state.items() if not t.is_floating_point()]
        self.heads = _heads(self.config)
        seen: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            first = seen.setdefault(id(parameter), name)
            if first != name and name.startswith(f"{recorded.blocks}."):
                raise QtoolError(f"{name} is {first}: its blocks share what each has of its own")
        self.forms: dict[Any, NormForm | None] = {}
        self.leaves = leaf_names(self.model)

    @cached_property
    def final_norm(self) -> str | None:
        """The norm that the head reads."""
        for read in self.trace.reads:
            if read.weight == f"{self.recorded.head}.weight" or read.module == self.recorded.head:
                blocks = f"{self.recorded.blocks}."  # of which some pass on what a norm gave
                norms = {c.name for c in self.trace.norms if not c.name.startswith(blocks)}
                return next((name for name in read.facts if name in norms), None)
        return None

    def is_hidden(self, tensor: str) -> bool:
        """Whether the model has ``tensor``, with one number for each hidden channel."""
        return self.state.get(tensor) == (self.hidden,)

    def why_fixed(self) -> str:
        """Why modules before and after the blocks keep the residual stream from being rotated."""
        tables = {f"{self.recorded.embedding}.weight"}
        if positions := self.positions:
            tables.add(f"{positions}.weight")
        start = self.recorded.start
        if start.keys() != tables or any(f.kind > Kind.SUM for f in start.values()):
            return "what enters the first block is not the embedding alone"
        norm = self.final_norm
        calls = [call for call in self.trace.norms if call.name == norm]
        if norm is None or len(calls) != 1 or not is_stream(calls[0].facts):
            return "the head does not read a norm of it"
        if self.form(norm) is None or norm in self.trace.escapes:
            return f"{norm} is no RMSNorm or LayerNorm that the head alone reads"
        heads = [r for r in self.trace.reads if norm in r.facts]
        if [r.weight for r in heads] not in (
            [f"{self.recorded.head}.weight"],
            [f"{self.recorded.embedding}.weight"],
        ) or any(f.kind > Kind.LINEAR for r in heads for f in r.facts.values()):
            return f"{norm} is read by more than the head"
        for read in self.trace.reads:
            if STREAM in read.facts and not read.weight.startswith(f"{self.recorded.blocks}."):
                return f"{read.module} reads it"
        return ""

    @cached_property
    def positions(self) -> str | None:
        """The table of learned positions, if only it is added to the embedding."""
        start, embedding = self.recorded.start, f"{self.recorded.embedding}.weight"
        others = [p for p in start if p != embedding]
        if embedding in start and len(others) == 1 and start[others[0]].kind == Kind.SUM:
            name = others[0].removesuffix(".weight")
            if isinstance(self.modules.get(name), nn.Embedding):
                return name
        return None

    @cached_property
    def sizes(self) -> dict[str, Callable[[Any], int]]:
        """Sizes that are numbers of the model itself."""
        vocabulary, hidden = self.state[f"{self.recorded.embedding}.weight"]
        sizes = {"vocab": vocabulary, "hidden": hidden}
        if (rows := self.state[f"{self.recorded.head}.weight"][0]) != vocabulary:
            sizes["head"] = rows  # an embedding may have a row more, for padding
        if positions := self.positions:
            sizes["positions"] = self.state[f"{positions}.weight"][0]
        for name, module in self.modules.items():
            if is_experts(module) and name.startswith(f"{self.recorded.blocks}."):
                sizes["experts"] = int(module.down_proj.shape[0])
        return {name: partial(_constant, size) for name, size in sizes.items()}

    def defaults(self) -> dict[str, Any]:
        """Values of keys that config.json may leave out, or has in its text_config."""
        found = {key: setting(self.config, key) for key in SIZES}
        found["num_hidden_layers"] = len(self.modules[self.recorded.blocks])
        found["num_experts_per_tok"] = self.recorded.active_experts or found["num_experts_per_tok"]
        found["num_attention_heads"] = found["num_attention_heads"] or 1  # no attention at all
        head = self.modules[self.recorded.head]
        embedding = self.modules[self.recorded.embedding]
        tied = head.weight is embedding.weight
        return {k: v for k, v in found.items() if v is not None} | {"tie_word_embeddings": tied}

    @cached_property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.state[f"{self.recorded.embedding}.weight"][1]

    @property
    def beside_hidden(self) -> int:
        """Numbers per token that enter a block beyond as many as the embedding has.

        An integer counts as several numbers of 16 bits.
        """
        others = [t for t in self.recorded.handed if not _of_all_tokens(t)]
        numbers = sum(t.numel() if t.is_floating_point() else t.nbytes // 2 for t in others)
        return self.recorded.width - self.hidden + numbers // prod(SHAPE)

    @property
    def index_bytes(self) -> int:
        """Bytes that enter a block for each pair of tokens."""
        return sum(t.dtype.itemsize for t in self.recorded.handed if _of_all_tokens(t))

    def expert_fold(self, module: str) -> Fold:
        """How the input of an expert's last linear depends on its first ones."""
        up, gate = gate_facts(self.modules[module])
        if gate is not None and gate != Kind.ORDERED:
            return Fold.NONE
        if up == Kind.SCALED:
            return Fold.PRODUCT
        return Fold.ACTIVATION if up == Kind.ORDERED else Fold.NONE

    def form(self, norm: str) -> NormForm | None:
        """How the norm ``norm`` uses its weight, None if that cannot be told."""
        module = self.modules[norm]
        settings = (v for v in vars(module).items() if isinstance(v[1], (int, float, str)))
        key = type(module), tuple(p.shape for p in module.parameters()), frozenset(settings)
        if key not in self.forms:
            self.forms[key] = form_of(module)
        return self.forms[key]


def _of_all_tokens(indices: Tensor) -> bool:
    """Whether an indexer chose, for each token, as many tokens as there are."""
    return not indices.is_floating_point() and indices.shape[1:] == (SHAPE[1], SHAPE[1])


def _constant(size: int, config: Any) -> int:
    return size


def setting(config: Any, key: str) -> Any:
    """A setting that all blocks share, None if they do not."""
    try:
        return getattr(config, key, None)
    except Exception:  # transformers' own error for a setting that differs by block
        return None


def _heads(config: Any) -> Heads | None:
    """The heads of all blocks, None if they differ or there are none."""
    try:
        return Heads.of(config)
    except Exception:  # transformers' own error again
        return None
