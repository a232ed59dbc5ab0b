"""A model family as a declaration: where its linears are, and what folds into what.

Nothing here runs a model or knows of quantization. A family is data; the transforms and the
pipeline read it. Names are module paths: absolute for the parts of the model, relative to the block
for the parts of a block. A name may also be a part of a fused linear (``fused``): some of its rows.

Shapes are written in words, ``"q hidden"``; a word is a size (:meth:`Family.dimensions`), a sum of
them or a number.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from qtool.errors import QtoolError
from qtool.models.parts import Attention, Experts, Heads, KVCache, LinearGroup, RowsOf, of_expert
from qtool.models.renaming import renamed
from qtool.models.unsupported import config_class
from qtool.units import whole_number

#: sizes in config.json: those of every model, those that may be null, and those that only some
#: families read (the config.json of another may set them to 0)
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL = (
    "intermediate_size",
    "head_dim",
    "num_key_value_heads",
    "num_kv_heads",
    "max_position_embeddings",
)
OF_SOME = ("ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
#: the words for sizes that every family has
SIZES = ("hidden", "q", "kv", "dim", "inter", "vocab")
#: the most that any config.json names (a dense Doge's has 16384 experts): one with more is damaged
MOST_BLOCKS, MOST_EXPERTS = 1024, 16384


@dataclass(frozen=True, eq=False)
class Family:
    """One model family.

    The first five fields are what every family declares. The others have defaults that fit Llama,
    in this order: the linears and norms of a block; the modules around the blocks, and sizes; what
    methods may not do, and why; what blocks take and return beside the hidden states; tensors in
    checkpoints; where the declaration comes from.

    Args:
        name: what messages call it.
        model_types: the ``model_type`` values of config.json it covers.
        groups: the linears of a block, in the order data flows through them.
        attention: the attention of a block; None if it has none, or another than the common one.
        tensors: every weight of a block and its shape in words.
        kv_cache: where a block gives its keys and values to a cache; None if it keeps none.
        biased: linears that always have a bias.
        biased_if: linears that have a bias when a config key is true, by that key.
        fused: linears that are several in one: their parts in order, each with its number of rows
            in words.
        fused_by_head: fused rows lie by kv head: each head's rows of every part in turn (Falcon).
        readers: modules in 16 bits that read a norm too (routers), by that norm.
        post_norms: norms of what is written to the residual stream.
        norm_offset: norms multiply by this number plus the weight.
        layer_norm: whether norms subtract the mean over channels and have biases.
        experts: where experts are; names of groups and tensors with ``*`` are repeated for each.
            ``sizes`` gives their number as ``experts``.
        choose: gives the family of one block, if the config decides it; may refuse the config.
        text: the part of the model that runs on text alone; mostly ``""``, the whole model.
        embedding: the module of the token embedding.
        positions: the table of learned positions, which is added to the embedding's output.
            ``sizes`` gives the number of its rows as ``positions``.
        blocks: the module list of the blocks.
        final_norm: the norm after the last block.
        final_bias: whether the final norm has a bias; None: as ``layer_norm`` says.
        head: the linear that gives the logits.
        always_tied: whether serving stacks know no head apart from the embedding, whatever
            config.json says.
        sizes: sizes that config.json has under other keys than Llama's.
        defaults: values of keys that config.json may leave out.
        refuses: transforms (and ``kv``, the quantized KV cache) that it cannot have, and why.
        fixed_stream: why the residual stream cannot be rotated, beside ``post_norms``.
        unquantized: linears of a block that stay in 16 bits, and why.
        streamed_only: why no method can be used that looks at activations.
        returns: the length of the tuple in which a block returns its output; 0: a bare tensor.
        passes: arguments of a block for what earlier blocks made beside the hidden states, each
            with its place in the tuple that those return; 0: they write into the argument.
        beside_hidden: the most numbers per token that enter a block beside its hidden states.
        index_bytes: bytes per pair of tokens that enter a block too: those of an indexer, which
            chooses for each token which others it attends to.
        whole_embedding: whether other modules than the embedding read the token ids.
        outside: shapes of tensors beside the blocks and the modules above; they stay as they are,
            except ``entering``.
        read_of_text: those of ``outside`` that a forward of text reads; the others are of towers.
        entering: those of ``outside`` whose outputs enter the residual stream beside text, each
            with the dimension of its channels of the stream; they are changed as the embedding is.
        other_linears: linears beside the blocks and the head.
        integers: names of tensors that hold whole numbers.
        disk_names: names of tensors and modules in checkpoints, by the names used here.
        rows_on_disk: tensors that loaders put together from rows of others on disk: those rows, one
            part after another along dimension 0.
        ignored: patterns of tensors that loaders leave out: buffers of old checkpoints, modules for
            multi-token prediction.
        transposed: weights that checkpoints hold with inputs before outputs (``Conv1D``).
        derived: whether it was derived from transformers' own model, at the sizes of one config.
    """

    # --- every family declares ---
    name: str
    model_types: tuple[str, ...]
    groups: tuple[LinearGroup, ...]
    attention: Attention | None
    tensors: Mapping[str, str]

    # --- the linears and norms of a block ---
    kv_cache: KVCache | None = field(default_factory=KVCache)
    biased: tuple[str, ...] = ()
    biased_if: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fused_by_head: bool = False
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    post_norms: tuple[str, ...] = ()
    norm_offset: float = 0.0
    layer_norm: bool = False
    experts: Experts | None = None
    choose: "Callable[[Any, int], Family] | None" = None

    # --- the modules around the blocks, and sizes ---
    text: str = ""
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    blocks: str = "model.layers"
    final_norm: str = "model.norm"
    final_bias: bool | None = None
    head: str = "lm_head"
    always_tied: bool = False
    sizes: Mapping[str, Callable[[Any], int]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    # --- what methods may not do, and why ---
    refuses: Mapping[str, str] = field(default_factory=dict)
    fixed_stream: str = ""
    unquantized: Mapping[str, str] = field(default_factory=dict)
    streamed_only: str = ""

    # --- what blocks take and return beside the hidden states ---
    returns: int = 0
    passes: Mapping[str, int] = field(default_factory=dict)
    beside_hidden: int = 0
    index_bytes: int = 0
    whole_embedding: bool = False

    # --- tensors in checkpoints ---
    outside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    read_of_text: tuple[str, ...] = ()
    entering: Mapping[str, int] = field(default_factory=dict)
    other_linears: tuple[str, ...] = ()
    integers: frozenset[str] = frozenset()
    disk_names: Mapping[str, str] = field(default_factory=dict)
    rows_on_disk: Mapping[str, tuple[RowsOf, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    transposed: frozenset[str] = frozenset()

    # --- where the declaration comes from ---
    derived: bool = False

    def at(self, config: Any, block: int) -> "Family":
        """The family as it is in block ``block``; one object for equal blocks."""
        family = self.choose(config, block) if self.choose else self
        if not family.experts:
            return family
        experts = family.sizes["experts"](config)
        if experts > MOST_EXPERTS:
            raise QtoolError(
                f"config.json: {experts} experts a block; at most {MOST_EXPERTS} are expected"
            )
        return family.of_experts(experts)

    def of_blocks(self, config: Any) -> "list[Family]":
        """The families of all blocks, in order."""
        return [self.at(config, block) for block in range(int(config.num_hidden_layers))]

    @cache  # noqa: B019  (families live as long as the program)
    def of_experts(self, count: int) -> "Family":
        """The family with the groups and tensors of all experts."""
        groups = tuple(
            group.of_expert(e) if "*" in group.linears[0] else group
            for group in self.groups
            for e in _each(group.linears[0], count)
        )
        tensors = {of_expert(n, e): s for n, s in self.tensors.items() for e in _each(n, count)}
        biased = tuple(of_expert(n, e) for n in self.biased for e in _each(n, count))
        return replace(self, groups=groups, tensors=tensors, biased=biased, experts=None)

    @property
    def why_fixed(self) -> str:
        """Why the residual stream cannot be rotated; empty where it can."""
        if self.fixed_stream or not self.post_norms:
            return self.fixed_stream
        return f"{self.post_norms[0]} acts on what is written to it"

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that the residual stream begins with: embedding, and learned positions."""
        return (self.embedding, self.positions) if self.positions else (self.embedding,)

    def settings(self, config: Mapping[str, Any]) -> SimpleNamespace:
        """config.json as an object, with defaults for missing keys.

        Missing sizes are those of transformers' class, whose ``attribute_map`` may give keys other
        names. All sizes of a derived family are those of the model that was built.

        Raises:
            QtoolError: a size that every model has is no positive whole number.
        """
        if self.derived:
            return SimpleNamespace(**{**config, **self.defaults})
        model_type = str(config.get("model_type"))
        keys: Mapping[str, str] = getattr(config_class(model_type), "attribute_map", {})
        mapped = {name: config[key] for name, key in keys.items() if key in config}
        sizes = _class_sizes(model_type)
        settings = SimpleNamespace(**{**sizes, **self.defaults, **mapped, **config})
        for key in (*REQUIRED, *OPTIONAL):
            value = getattr(settings, key, None)
            if (key in REQUIRED or value is not None) and not is_size(value):
                raise QtoolError(
                    f"config.json: {key} is {value!r}; a positive whole number is expected"
                )
        return settings

    def disk_name(self, name: str) -> str:
        """The name that checkpoints have for the tensor or module ``name``."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            for suffix in ("", ".weight"):
                own = ".".join(parts[:count]) + suffix
                if own in self.disk_names:
                    disk = self.disk_names[own].removesuffix(suffix)
                    return ".".join([disk, *parts[count:]])
        return name

    def named_as(self, names: Mapping[str, str]) -> "Family":
        """This family, of checkpoints whose modules (or tensors) have ``names``."""
        if not names:
            return self
        known = {*self.disk_names, *self.outside}
        others = {own: other for own in known if (other := renamed(own, names)) != own}
        return replace(self, disk_names={**self.disk_names, **names, **others})

    def published_names(self, linear: str) -> list[str]:
        """The names in checkpoints of ``linear``, or of the linears whose rows make it up."""
        parts = self.rows_on_disk.get(f"{linear}.weight", ())
        names = dict.fromkeys(part.name.removesuffix(".weight") for part in parts)
        return list(names) or [self.disk_name(linear)]

    def linears(self) -> Iterator[str]:
        """Names within a block of the linears that may be quantized."""
        for group in self.groups:
            yield from group.linears

    def all_linears(self, config: Any) -> Iterator[str]:
        """Full names of the linears of all blocks that may be quantized."""
        for block, own in enumerate(self.of_blocks(config)):
            for linear in own.linears():
                yield f"{self.blocks}.{block}.{linear}"

    def place(self, name: str) -> tuple[int | None, str]:
        """The block of a full name, None outside of blocks, and the name within the block."""
        prefix = f"{self.blocks}."
        block, _, within = name.removeprefix(prefix).partition(".")
        return (whole_number(block) if name.startswith(prefix) else None), within

    def tensor_parallel(self, config: Any, ranks: int) -> dict[str, tuple[int, int]]:
        """Into how many parts serving stacks cut N and K of each linear, over ``ranks`` GPUs.

        Raises:
            QtoolError: the attention heads do not divide.
        """
        heads = Heads.of(config)
        if heads.query % ranks:
            raise QtoolError(f"{heads.query} attention heads cannot be split over {ranks} GPUs")
        if self.attention and max(heads.kv, ranks) % min(heads.kv, ranks):
            raise QtoolError(f"{heads.kv} kv heads cannot be split over {ranks} GPUs")
        keys_and_values = {self.attention.k, self.attention.v} if self.attention else set()
        split = {}
        for group in self.groups:
            for linear in group.linears:
                if linear in keys_and_values:  # fewer kv heads than GPUs are replicated
                    split[linear] = (min(ranks, heads.kv), 1)
                elif linear.endswith((".q_a_proj", ".kv_a_proj_with_mqa")):  # latent attention
                    split[linear] = (1, 1)
                else:
                    split[linear] = (1, ranks) if group.writes_residual else (ranks, 1)
        return split

    def group_of(self, linear: str) -> LinearGroup:
        """The group that ``linear`` belongs to."""
        return next(group for group in self.groups if linear in group.linears)

    def folds(self) -> Iterator[LinearGroup]:
        """Groups of linears that must share a factor on their input.

        All that reads one norm is one group, which is not ``routed``: the norm sees every token.
        """
        merged: dict[str, LinearGroup] = {}
        for group in self.groups:
            key = group.source if group.reads_residual else group.linears[0]
            before = merged[key].linears if key in merged else self.readers.get(group.source, ())
            routed = group.routed and not group.reads_residual
            merged[key] = replace(group, linears=(*before, *group.linears), routed=routed)
        yield from merged.values()

    def owner(self, name: str) -> str:
        """The linear whose rows ``name`` is: itself unless it is part of a fused one."""
        return next((linear for linear, parts in self.fused.items() if name in parts), name)

    def rows(self, name: str, config: Any) -> slice | list[int]:
        """The rows of ``name`` in its :meth:`owner`."""
        parts, dims = self.fused.get(self.owner(name), {}), self.dimensions(config)
        if name not in parts:
            return slice(None)
        turns = Heads.of(config).kv if self.fused_by_head else 1
        # rows of each in a turn
        sizes = {part: size_of(words, dims) // turns for part, words in parts.items()}
        names = list(parts)
        start = sum(sizes[part] for part in names[: names.index(name)])
        if turns == 1:
            return slice(start, start + sizes[name])
        whole = sum(sizes.values())
        return [turn * whole + start + row for turn in range(turns) for row in range(sizes[name])]

    def block_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of a block, by name within the block; reads no weights."""
        dims = self.dimensions(config)
        # computed once for many experts
        known = {words: _shape(words, dims) for words in set(self.tensors.values())}
        shapes = {name: known[words] for name, words in self.tensors.items()}
        biased = set(self.biased)
        for key, linears in self.biased_if.items():
            biased.update(linears if getattr(config, key, False) else ())
        return shapes | {
            f"{name}.bias": shapes[f"{name}.weight"][:1]
            for name in self.linears()
            if name in biased
        }

    def shape(self, tensor: str, config: Any) -> tuple[int, ...]:
        """Shape of one tensor of a block."""
        return _shape(self.tensors[tensor], self.dimensions(config))

    def linear_shape(self, name: str, config: Any) -> tuple[int, int]:
        """``(N, K)`` of the linear of the full name ``name``.

        Raises:
            QtoolError: no block has such a linear.
        """
        block, within = self.place(name)
        own = None if block is None else self.at(config, block)
        if own is None or f"{within}.weight" not in own.tensors:
            raise QtoolError(f"{name}: not a linear of {self.name} blocks")
        n, k = own.shape(f"{within}.weight", config)
        return n, k

    def dimensions(self, config: Any) -> dict[str, int]:
        """Sizes by word: hidden, q, kv, dim (of a head), inter, vocab and the family's own."""
        heads = Heads.of(config)
        return {
            "hidden": config.hidden_size,
            "q": heads.query * heads.dim,
            "kv": heads.kv * heads.dim,
            "dim": heads.dim,
            "inter": getattr(config, "intermediate_size", 0),
            "vocab": config.vocab_size,
            **{name: size(config) for name, size in self.sizes.items()},
        }


def is_size(value: Any) -> bool:
    """Whether ``value`` is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@cache
def _class_sizes(model_type: str) -> dict[str, int]:
    """The sizes that transformers assumes if a config.json of ``model_type`` leaves them out."""
    known = config_class(model_type)
    found = {name: getattr(known, name, None) for name in (*REQUIRED, *OPTIONAL, *OF_SOME)}
    return {name: size for name, size in found.items() if isinstance(size, int)}


def _each(name: str, count: int) -> range:
    """The experts that ``name`` is repeated for."""
    return range(count if "*" in name else 1)


def _shape(words: str, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size_of(word, dims) for word in words.split())


def size_of(words: str, dims: Mapping[str, int]) -> int:
    """The number that ``words`` mean, a sum of sizes of ``dims`` and of numbers."""
    numbers = ((word, whole_number(word)) for word in words.split("+"))
    return sum(dims[word] if number is None else number for word, number in numbers)
