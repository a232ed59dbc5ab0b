"""A family derived from config.json alone, by one forward of transformers' own model.

No weight is read. :mod:`qtool.models.trace` follows the channels of the forward; its findings
become a :class:`~qtool.models.family.Family` like those declared by hand. What is not proved is
left out: :attr:`~qtool.models.family.Family.kept` says why a linear stays in 16 bit, and
``refuses`` and ``fixed_stream`` why a transform is left out.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn

from qtool.errors import QtoolError
from qtool.models.experts import Form, disk_names, expert_parts, gate_facts, is_experts, leaf_names
from qtool.models.family import Family
from qtool.models.forward import Recorded, acts_linear, build, record
from qtool.models.norms import NormForm, form_of
from qtool.models.parts import Attention, Experts, Fold, Heads, LinearGroup
from qtool.models.trace import PART, STREAM, AttentionCall, Fact, Facts, Kind, NormCall, Read

#: rows under which no kernel has a tile
NARROWEST = 64
#: what a hidden size is divided by for the rows of a linear that is too small to matter
SMALL_SHARE = 16
#: names that a block's argument for the KV cache has
CACHES = ("past_key_values", "layer_past", "past_key_value")
#: sizes that a config has under names of its own, by transformers' common ones
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "intermediate_size", "max_position_embeddings"),
    *("num_experts_per_tok", "partial_rotary_factor", "rope_parameters"),
)


def derive(config: Mapping[str, Any]) -> Family:
    """The family of the model of a config.json, at its sizes.

    Raises:
        QtoolError: transformers cannot build it, or its forward has no blocks that can be followed.
    """
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "_name_or_path")}
    return _derived(json.dumps(plain, sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _derived(config: str) -> Family:
    try:
        with torch.device("cpu"):  # a caller may be building a model on another one
            plain = json.loads(config, object_hook=_number)
            return _Model(record(build(plain))).family()
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise QtoolError(f"its structure is not understood ({error})") from error


def _number(found: dict[str, Any]) -> Any:
    """What transformers writes for an infinite number: ``{"__float__": "Infinity"}``."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


class _Model:
    """A recorded model, block by block."""

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

    def family(self) -> Family:
        firsts: dict[int, Family] = {}
        kinds: dict[Any, Family] = {}
        for number in dict.fromkeys(self.recorded.like):
            block = _Block(self, f"{self.recorded.blocks}.{number}.")
            family = self._with_disk_names(block.family(), number)
            firsts[number] = kinds.setdefault(block.signature(), family)
        return self._whole([firsts[number] for number in self.recorded.like])

    def _whole(self, of_block: list[Family]) -> Family:
        """The family of the model from those of its blocks."""
        if not any(family.groups for family in of_block):
            kept = next((f"; {n} is not: {why}" for n, why in of_block[0].kept.items()), "")
            raise QtoolError(f"its blocks have no linear that can be quantized{kept}")
        main = next((f for f in of_block if f.experts), of_block[0])
        unproved = {reason for family in of_block for reason in [family.fixed_stream] if reason}
        stream = next(iter(unproved), "") or self._outside_stream()
        final_norm = self.final_norm
        refuses = {k: v for family in of_block for k, v in family.refuses.items()}
        offsets = {f.norm_offset for f in of_block}
        final = self.form(final_norm) if final_norm else None
        if final is not None and not stream:
            offsets.add(final.offset)
        if len(offsets) > 1:
            stream = stream or "its norms do not multiply by their weights in one way"
        common: dict[str, Any] = {
            "name": type(self.model).__name__.removesuffix("ForCausalLM"),
            "model_types": (self.model.config.model_type,),
            "refuses": refuses,
            "fixed_stream": stream,
            "embedding": self.recorded.embedding,
            "positions": self._positions(),
            "blocks": self.recorded.blocks,
            "final_norm": final_norm if self._is_hidden(f"{final_norm}.weight") else "",
            "final_bias": self._is_hidden(f"{final_norm}.bias"),
            "head": self.recorded.head,
            "sizes": self._sizes(),
            "defaults": self._defaults(),
            "returns": self.recorded.outputs,
            "streamed_only": self._streamed_only(),
            "whole_embedding": self.recorded.reads_ids,
            "disk_names": self.disk_names,
            "joined": self.joined,
            "other_linears": tuple(
                name
                for name, module in self.modules.items()
                if isinstance(module, nn.Linear)
                and not name.startswith(f"{self.recorded.blocks}.")
                and name != self.recorded.head
            ),
            "integers": frozenset(self.integers),
            "layer_norm": any(f.layer_norm for f in of_block),
            "derived": True,
        }
        common["outside"] = self._outside(common)
        called = set(self.trace.called)
        common["read_of_text"] = tuple(
            name for name in common["outside"] if name.rpartition(".")[0] in called
        )
        own = {id(f): replace(f, **common, norm_offset=f.norm_offset) for f in of_block}
        whole = own[id(main)]
        if len(own) == 1:
            return whole
        numbered = [own[id(f)] for f in of_block]
        return replace(whole, choose=lambda config, block: numbered[block])

    @cached_property
    def final_norm(self) -> str | None:
        """The norm that the head reads."""
        for read in self.trace.reads:
            if read.weight == f"{self.recorded.head}.weight" or read.module == self.recorded.head:
                norms = {call.name for call in self.trace.norms}
                return next((p for p, f in read.facts.items() if p in norms), None)
        return None

    def _is_hidden(self, tensor: str) -> bool:
        """Whether there is such a tensor, a number for each hidden channel."""
        return self.state.get(tensor) == (self.hidden,)

    def _outside_stream(self) -> str:
        """Why the residual stream cannot be rotated, by what is before and after the blocks."""
        tables = {f"{self.recorded.embedding}.weight"}
        if positions := self._positions():
            tables.add(f"{positions}.weight")
        if self.model.config is not self.config:
            return "what is no text enters it too"
        start = self.recorded.start
        if start.keys() != tables or any(f.kind > Kind.SUM for f in start.values()):
            return "what enters the first block is not the embedding alone"
        norm = self.final_norm
        calls = [call for call in self.trace.norms if call.name == norm]
        if norm is None or len(calls) != 1 or not _is_stream(calls[0].facts):
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

    def _positions(self) -> str | None:
        """The table of learned positions, where it alone is added to the embedding."""
        start, embedding = self.recorded.start, f"{self.recorded.embedding}.weight"
        others = [p for p in start if p != embedding]
        if embedding in start and len(others) == 1 and start[others[0]].kind == Kind.SUM:
            name = others[0].removesuffix(".weight")
            if isinstance(self.modules.get(name), nn.Embedding):
                return name
        return None

    def _sizes(self) -> dict[str, Callable[[Any], int]]:
        """Sizes that are numbers of the model itself."""
        sizes = {"vocab": self.state[f"{self.recorded.embedding}.weight"][0]}
        sizes["hidden"] = self.state[f"{self.recorded.embedding}.weight"][1]
        if (rows := self.state[f"{self.recorded.head}.weight"][0]) != sizes["vocab"]:
            sizes["head"] = rows  # an embedding may have a row more, for padding
        if positions := self._positions():
            sizes["positions"] = self.state[f"{positions}.weight"][0]
        for name, module in self.modules.items():
            if is_experts(module) and name.startswith(f"{self.recorded.blocks}."):
                sizes["experts"] = int(module.down_proj.shape[0])  # type: ignore[union-attr, index]
        return {name: partial(_constant, size) for name, size in sizes.items()}

    def _defaults(self) -> dict[str, Any]:
        """Values of keys that config.json may leave out, or has in its text_config."""
        found = {key: _setting(self.config, key) for key in SIZES}
        found["num_hidden_layers"] = len(self.modules[self.recorded.blocks])  # type: ignore[arg-type]
        found["num_experts_per_tok"] = self.recorded.active_experts or found["num_experts_per_tok"]
        found["num_attention_heads"] = found["num_attention_heads"] or 1  # no attention at all
        head = self.model.get_output_embeddings()
        embedding = self.model.get_input_embeddings()
        tied = head is not None and head.weight is embedding.weight
        return {k: v for k, v in found.items() if v is not None} | {"tie_word_embeddings": tied}

    def _outside(self, common: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Tensors beside blocks, tables, final norm and head, which stay as they are."""
        known = {
            f"{common[part]}.weight" for part in ("embedding", "positions", "final_norm", "head")
        }
        known.add(f"{common['final_norm']}.bias")
        blocks = f"{self.recorded.blocks}."
        return {
            name: shape
            for name, shape in self.state.items()
            if not name.startswith(blocks) and name not in known
        }

    def _with_disk_names(self, family: Family, block: int) -> Family:
        """``family`` of block ``block`` with its mixture called as on disk.

        Only where nothing but the prefix is another.
        """
        if family.experts is None:
            return family
        prefix = f"{self.recorded.blocks}.{block}."
        own = family.experts.attribute
        names = {n: d for n, d in self.disk_names.items() if n.startswith(f"{prefix}{own}.")}
        stack = f"{prefix}{own}.experts"
        if stack not in names or not names[stack].endswith(".experts"):
            return family
        disk = names[stack].removeprefix(prefix).removesuffix(".experts")
        tensors = {n.removeprefix(prefix) for n in self.state if n.startswith(f"{prefix}{own}.")}
        for tensor in tensors:
            if tensor.startswith(f"{own}.experts."):
                continue
            if names.get(prefix + tensor) != f"{prefix}{disk}{tensor[len(own) :]}":
                return family
        alike = (n for n, like in enumerate(self.recorded.like) if like == block)
        prefixes = tuple(f"{self.recorded.blocks}.{n}.{own}." for n in alike)
        self.disk_names = {n: d for n, d in self.disk_names.items() if not n.startswith(prefixes)}
        return _renamed(family, own, disk)

    @cached_property
    def disk_names(self) -> dict[str, str]:
        """Names that ``save_pretrained`` gives to what is called otherwise in the model."""
        return {
            own: disk
            for first, disk_name in self._on_disk[0].items()
            for own, disk in self._in_all_blocks(first, disk_name)
        }

    @cached_property
    def joined(self) -> dict[str, dict[str, int]]:
        """The names on disk of tensors that loaders make of several, and the rows of each."""
        found: dict[str, dict[str, int]] = {}
        for first, parts in self._on_disk[1].items():
            for part, rows in parts.items():
                for own, disk in self._in_all_blocks(first, part):
                    found.setdefault(own, {})[disk] = rows
        return found

    @cached_property
    def _on_disk(self) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        return disk_names(self.model, set(self.recorded.like), self.recorded.blocks)

    def _in_all_blocks(self, own: str, disk: str) -> Iterator[tuple[str, str]]:
        """A name and that on disk, in all blocks like the one they are of."""
        prefix = f"{self.recorded.blocks}."
        if not own.startswith(prefix):
            yield own, disk
            return
        first = int(own[len(prefix) :].partition(".")[0])
        for number, like in enumerate(self.recorded.like):
            if like == first:
                old, new = rf"\.{first}\.", f".{number}."
                yield re.sub(old, new, own, count=1), re.sub(old, new, disk, count=1)

    def _streamed_only(self) -> str:
        """Why no method that runs blocks one by one can be had."""
        return self.recorded.impure

    @cached_property
    def hidden(self) -> int:
        return self.state[f"{self.recorded.embedding}.weight"][1]

    def expert_fold(self, module: str) -> Fold:
        """How the input of an expert's last linear depends on its first ones."""
        up, gate = gate_facts(self.modules[module])
        if gate is not None and gate != Kind.ORDERED:
            return Fold.NONE
        if up == Kind.SCALED:
            return Fold.PRODUCT
        return Fold.ACTIVATION if up == Kind.ORDERED else Fold.NONE

    def form(self, norm: str) -> NormForm | None:
        """How norm ``norm`` uses its weight, None where that cannot be told."""
        module = self.modules[norm]
        key = type(module), tuple(p.shape for p in module.parameters())
        if key not in self.forms:
            self.forms[key] = form_of(module)
        return self.forms[key]


def _constant(size: int, config: Any) -> int:
    return size


def _renamed(family: Family, own: str, disk: str) -> Family:
    """``family`` with the module ``own`` of a block called ``disk``."""

    def named(name: str) -> str:
        return disk + name[len(own) :] if name.startswith(f"{own}.") else name

    groups = tuple(
        replace(
            g,
            linears=tuple(map(named, g.linears)),
            source=named(g.source),
            gate=g.gate and named(g.gate),
        )
        for g in family.groups
    )
    experts = family.experts and replace(family.experts, moe=disk)
    return replace(
        family,
        groups=groups,
        experts=experts,
        tensors={named(n): shape for n, shape in family.tensors.items()},
        biased=tuple(map(named, family.biased)),
        fused={
            named(n): {named(p): rows for p, rows in parts.items()}
            for n, parts in family.fused.items()
        },
        readers={n: tuple(map(named, names)) for n, names in family.readers.items()},
        kept={named(n): reason for n, reason in family.kept.items()},
    )


def _setting(config: Any, key: str) -> Any:
    """A setting that all blocks share, None where they do not."""
    try:
        return getattr(config, key, None)
    except Exception:  # transformers' own error for a setting that differs by block
        return None


def _heads(config: Any) -> Heads | None:
    """The heads of all blocks, None where they differ or there are none."""
    try:
        return Heads.of(config)
    except Exception:  # likewise
        return None


def _is_stream(facts: Facts) -> bool:
    return facts.keys() == {STREAM} and facts[STREAM].kind == Kind.LINEAR


@dataclass
class _Block:
    """One block of a recorded model; ``prefix`` ends with a dot."""

    model: _Model
    prefix: str
    stream: str = field(default="", init=False)
    kept: dict[str, str] = field(default_factory=dict, init=False)
    by_head: bool = field(default=False, init=False)
    turned: list[Any] = field(default_factory=list, init=False)
    offset: float = field(default=0.0, init=False)

    def signature(self) -> Any:
        """What equal blocks share."""
        names = tuple(
            (name.removeprefix(self.prefix), shape)
            for name, shape in self.model.state.items()
            if name.startswith(self.prefix)
        )
        reads = tuple(
            (self.short(read.weight), tuple(sorted(self._short_facts(read.facts))))
            for read in self.reads
        )
        calls = tuple((self.short(n.name), tuple(self._short_facts(n.facts))) for n in self.norms)
        turned = tuple(self.short(p) for p in self.model.trace.pairs if p.startswith(self.prefix))
        return names, reads, calls, turned

    def _short_facts(self, facts: Facts) -> list[tuple[str, Kind]]:
        return [(self.short(p), f.kind) for p, f in facts.items()]

    def short(self, name: str) -> str:
        return name.removeprefix(self.prefix).removesuffix(".weight")

    @cached_property
    def reads(self) -> list[Read]:
        return [r for r in self.model.trace.reads if r.weight.startswith(self.prefix)]

    @cached_property
    def norms(self) -> list[NormCall]:
        return [n for n in self.model.trace.norms if n.name.startswith(self.prefix)]

    @cached_property
    def experts(self) -> dict[str, Read]:
        found = self.model.trace.experts
        return {name: read for name, read in found.items() if name.startswith(self.prefix)}

    # the family of the block

    def family(self) -> Family:
        """The block's family, without what is common to all blocks."""
        groups = [self._fold(linears, read) for linears, read in self._groups()]
        norms = [f for g in groups if g.fold is Fold.NORM and (f := self._form(g.source))]
        if len({form.offset for form in norms}) > 1:
            self._fix("its norms do not multiply by their weights in one way")
            groups = [_unfolded(g) if g.fold is Fold.NORM else g for g in groups]
        self.offset = norms[0].offset if norms else 0.0
        tensors, biased = self._tensors({linear for group in groups for linear in group.linears})
        attention = self._attention(groups)
        self._check_stream(groups)
        experts = next(iter(self.experts), None)
        return Family(
            name="",
            model_types=(),
            groups=tuple(groups),
            attention=attention,
            tensors=tensors,
            biased=biased,
            fused=self._fused,
            fused_by_head=self.by_head,
            readers=self._readers(groups),
            post_norms=self._post_norms(),
            norm_offset=self.offset,
            layer_norm=any(form.centred for form in norms),
            experts=self._experts(experts) if experts else None,
            refuses=self._refused(attention),
            fixed_stream=self.stream,
            kept=self.kept,
        )

    # linears

    def _linear(self, name: str) -> nn.Linear | None:
        """The module of the weight ``name`` if it is a plain linear."""
        module = self.model.modules.get(name.removesuffix(".weight"))
        return module if module is not None and acts_linear(module) else None  # type: ignore[return-value]

    @cached_property
    def _attended(self) -> set[str]:
        """What queries, keys and values of the block depend on."""
        calls = self.model.trace.attentions
        sides = (side for call in calls for side in (call.q, call.k, call.v))
        return {p for side in sides for p in side if p.startswith(self.prefix)}

    def _why_kept(self, read: Read) -> str:
        """Why the linear of ``read`` stays in 16 bit; empty where it need not."""
        linear = self._linear(read.weight)
        routed = {r.root for r in self.experts.values()}
        rows = self.model.state[read.weight][0]
        if read.root in routed and rows == self.model._sizes()["experts"](None):
            return "a router"
        if linear is None:
            return f"{type(self.model.modules.get(read.module)).__name__} is no plain linear"
        if f"{read.module}.weight" != read.weight or not read.transposed:
            return "its weight is read outside its own forward"
        n, k = linear.weight.shape
        if n < NARROWEST:
            return f"{n} rows, narrower than a tile of {NARROWEST}"
        if n < self.model.hidden // SMALL_SHARE and read.weight not in self._attended:
            return f"{n} rows, which weigh little of a hidden size of {self.model.hidden}"
        if k % NARROWEST:
            return f"{k} inputs, which groups of {NARROWEST} do not divide"
        if self._absorbed(read):
            return "engines multiply it into the attention over latents"
        return ""

    def _absorbed(self, read: Read) -> bool:
        """Whether it makes keys and values of a normed latent (MLA)."""
        latents = {n.name for n in self.norms if STREAM not in n.facts}
        of_latent = any(p in latents for p in read.facts)
        return of_latent and any(
            read.weight in call.k and read.weight in call.v for call in self.model.trace.attentions
        )

    def _groups(self) -> list[tuple[tuple[str, ...], Read]]:
        """Names of linears that read one input, and one of their reads, in order."""
        found: dict[Any, list[Read]] = {}
        calls: dict[str, int] = {}
        for read in self.reads:
            calls[read.weight] = calls.get(read.weight, 0) + 1
        for read in [*self.reads, *self.experts.values()]:
            found.setdefault((read.root, read.weight in self.experts), []).append(read)
        called = {read.weight for read in self.reads}
        groups: list[tuple[tuple[str, ...], Read]] = []
        for name, module in self.model.modules.items():
            full = f"{name}.weight"
            if (
                name.startswith(self.prefix)
                and isinstance(module, nn.Linear)
                and full not in called
            ):
                self.kept[self.short(name)] = "the forward does not call it"
        for reads in found.values():
            linears = []
            for read in reads:
                if read.weight in self.experts:
                    names = self._expert_names(read.weight)
                    linears += [n for n in (names.gate, names.up) if n]
                elif why := self._why_kept(read):
                    self.kept[self.short(read.weight)] = why
                elif self.short(read.weight) not in linears:
                    linears.append(self.short(read.weight))
            if linears:
                groups.append((tuple(linears), reads[0]))
            if reads[0].weight in self.experts:
                groups.append(((self._expert_names(reads[0].weight).down,), reads[0]))
        order = {name: i for i, name in enumerate(self.model.trace.called)}
        return sorted(groups, key=lambda g: order.get(self._first_called(g[0][0]), len(order)))

    def _first_called(self, linear: str) -> str:
        return self.prefix + linear.partition(".*")[0]

    # folds

    def _fold(self, linears: tuple[str, ...], read: Read) -> LinearGroup:
        """The group of ``linears`` with what its input is proved to be."""
        writes = any(f"{self.prefix}{n}.weight" in self._written for n in linears)
        if "*" in linears[0] and (inner := self._expert_names(read.weight)).down in linears:
            fold = self.model.expert_fold(read.weight)
            source, gate = (inner.up, inner.gate) if fold is not Fold.NONE else ("", None)
            written = read.weight in self._written
            return LinearGroup(linears, source, fold, writes_residual=written, gate=gate)
        none = LinearGroup(linears, "", Fold.NONE, writes_residual=writes)
        facts = {p: f for p, f in read.facts.items() if f.channels is not None}
        if len(read.facts) == 1 and self._reads_norm(read):
            return replace(none, source=self.short(next(iter(facts))), fold=Fold.NORM)
        if (
            not facts
            or not all(self._linear(p.partition(PART)[0]) for p in facts)
            or not self._only(facts, linears)
        ):
            return none
        direct = [p for p, f in facts.items() if f.kind <= Kind.SCALED]
        others = [p for p, f in facts.items() if f.kind == Kind.ORDERED]
        if len(direct) + len(others) < len(facts) or any(
            f.kind == Kind.SUM for f in facts.values()
        ):
            return none
        if len(direct) == 1 and self._is_attention_output(direct[0], facts[direct[0]]):
            names = self._heads_of(direct[0], facts[direct[0]])
            return replace(none, source=names["v_proj"], fold=Fold.HEADS) if names else none
        if any(p in self._attended for p in direct) or len(facts) < len(read.facts):
            return none
        return self._product(none, facts, direct, others)

    def _product(
        self, none: LinearGroup, facts: Facts, direct: list[str], others: list[str]
    ) -> LinearGroup:
        """``act(gate) * up``, or a function of one linear alone."""
        if len(direct) > 1 or len(others) > 2 or len(facts) > 2:
            return none
        if direct and facts[direct[0]].kind < Kind.SCALED:
            return none
        up, gate = ([*direct, *others, ""])[:2]
        if not direct and gate:  # both in some function: an order passes, in both alike
            up, gate = gate, up
        names = self._parts(
            {"up_proj": (up, facts[up])} | ({"gate_proj": (gate, facts[gate])} if gate else {})
        )
        if names is None or not all(_in_order_of_rows(fact) for fact in facts.values()):
            return none
        fold = Fold.PRODUCT if direct else Fold.ACTIVATION
        return replace(none, source=names["up_proj"], fold=fold, gate=names.get("gate_proj"))

    def _form(self, norm: str) -> NormForm | None:
        full = norm if norm.startswith(self.prefix) else self.prefix + norm
        return self.model.form(full)

    def _reads_norm(self, read: Read) -> bool:
        """Whether the input is a norm of the residual stream that only linears read."""
        (name, fact), *_ = read.facts.items()
        call = next((n for n in self.norms if n.name == name), None)
        if call is None or not _is_stream(call.facts) or self._form(name) is None:
            return False
        if name in self.model.trace.escapes or not _in_order(fact) or fact.kind > Kind.LINEAR:
            return False
        if any(name in used for used in self._used_unread):
            return False
        readers = [r for r in self.reads if name in r.facts]
        return all(
            isinstance(m := self.model.modules.get(r.weight.removesuffix(".weight")), nn.Module)
            and r.weight.endswith(".weight")
            and r.transposed
            and len(r.facts) == 1
            and r.facts[name].kind == Kind.LINEAR
            and hasattr(m, "weight")
            for r in readers
        )

    @cached_property
    def _used_unread(self) -> list[Facts]:
        """Facts of what norms norm, and of what is added to the residual stream."""
        used = [call.facts for call in self.norms] + [f for _, f in self.model.trace.writers]
        return [{p: f for p, f in facts.items() if f.channels is not None} for facts in used]

    def _only(self, facts: Facts, linears: tuple[str, ...]) -> bool:
        """Whether the producers of ``facts`` go into ``linears`` and nowhere else."""
        for producer, fact in facts.items():
            rows, owner = _rows(fact), producer.partition(PART)[0]
            for escape in self.model.trace.escapes.get(owner, ()):
                if bool(escape.channels[rows[rows < len(escape.channels)]].any()):
                    return False
            others = [r for r in self.model.trace.reads if self.short(r.weight) not in linears]
            reads = [r.facts for r in (*others, *self.experts.values())]
            for used in [*reads, *self._used_unread]:
                for name, other in used.items():
                    known = name.partition(PART)[0] == owner and other.channels is not None
                    if known and bool(torch.isin(_rows(other), rows).any()):
                        return False
        return True

    def _is_attention_output(self, producer: str, fact: Fact) -> bool:
        """Whether the input is attention's output in the order of heads that config.json says."""
        heads = self.model.heads
        if heads is None or fact.kind < Kind.HEADS or heads.query % heads.kv:
            return False
        if not any(_channelwise(call.v) == [producer] for call in self.model.trace.attentions):
            return False
        rows = _rows(fact)
        values = fact.channels[(0,) * (fact.channels.dim() - 1)]  # type: ignore[union-attr, index]
        if len(rows) != heads.kv * heads.dim or len(values) != heads.query * heads.dim:
            return False
        place = torch.arange(heads.kv).repeat_interleave(heads.query // heads.kv)
        expected = (place[:, None] * heads.dim + torch.arange(heads.dim)).flatten()
        return bool((values.long() == rows[expected]).all())

    # parts of fused linears

    @cached_property
    def _fused(self) -> dict[str, dict[str, str]]:
        """Fused linears that a fold needs the parts of."""
        return {}

    def _parts(self, roles: Mapping[str, tuple[str, Fact]]) -> dict[str, str] | None:
        """Names by role of linears or, where one is fused, of its parts; None if they are neither.

        ``roles`` maps each role to a producer and the fact that says which of its rows play it.
        """
        names: dict[str, str] = {}
        owners: dict[str, dict[str, torch.Tensor]] = {}
        for role, (producer, fact) in roles.items():
            owner, rows = producer.partition(PART)[0], _rows(fact)
            if len(rows) == self.model.state[owner][0]:
                names[role] = self.short(owner)
            else:
                name = self.short(owner)
                parent = name.rpartition(".")[0]
                names[role] = f"{parent}.{role}" if parent else role
                owners.setdefault(owner, {})[names[role]] = rows
        for owner, parts in owners.items():
            parts = dict(sorted(parts.items(), key=lambda item: int(item[1][0])))
            if sum(map(len, parts.values())) != self.model.state[owner][0]:
                return None
            by_head = not all(_contiguous(rows) for rows in parts.values())
            if by_head and not self._by_head(parts):
                return None
            self._fused[self.short(owner)] = {name: str(len(rows)) for name, rows in parts.items()}
            self.by_head = self.by_head or by_head
        return names

    def _by_head(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Whether the rows of a fused linear go by kv head, with each part's share of it."""
        heads = self.model.heads
        if heads is None or any(len(rows) % heads.kv for rows in parts.values()):
            return False
        start, whole = 0, sum(map(len, parts.values())) // heads.kv
        for rows in parts.values():
            size = len(rows) // heads.kv
            turns = torch.arange(heads.kv)[:, None] * whole + start
            if not torch.equal(rows, (turns + torch.arange(size)).flatten()):
                return False
            start += size
        return True

    # attention

    def _attention_of(self, values: str) -> AttentionCall | None:
        calls = [c for c in self.model.trace.attentions if _channelwise(c.v) == [values]]
        return calls[0] if len(calls) == 1 else None

    def _heads_of(self, producer: str, fact: Fact) -> dict[str, str] | None:
        """Names of q, k and v (or of v alone) where ``producer`` makes the values."""
        call = self._attention_of(producer)
        if call is None:
            return None
        roles = {"v_proj": (producer, call.v[producer])}
        for role, side in (("q_proj", call.q), ("k_proj", call.k)):
            if (found := self._projection(side)) is not None:
                roles[role] = found[0]
        return self._parts(roles)

    def _projection(self, side: Facts) -> tuple[tuple[str, Fact], str | None] | None:
        """The linear that makes queries or keys, and the norm behind it."""
        names = _channelwise(side)
        if len(names) != 1:
            return None
        name = names[0]
        call = next((n for n in self.norms if n.name == name), None)
        if call is None:
            return ((name, side[name]), None) if self._linear(name) else None
        inner = _channelwise(call.facts)
        if len(inner) != 1 or not self._linear(inner[0]) or self._form(name) is None:
            return None
        return (inner[0], call.facts[inner[0]]), self.short(name)

    def _attention(self, groups: list[LinearGroup]) -> Attention | None:
        """The attention of the block where it is proved to be the common one."""
        for group in groups:
            if group.fold is not Fold.HEADS:
                continue
            owner = next(
                (o for o, parts in self._fused.items() if group.source in parts), group.source
            )
            producer = f"{self.prefix}{owner}.weight"
            call = self._attention_of(producer)
            read = next(r for r in self.reads if self.short(r.weight) == group.linears[0])
            if call is None or read.facts[producer].kind != Kind.HEADS:
                continue
            sides = [self._projection(side) for side in (call.q, call.k)]
            names = self._heads_of(producer, call.v[producer])
            if None in sides or names is None or not {"q_proj", "k_proj"} <= names.keys():
                continue
            norms = [side[1] for side in sides if side is not None]
            kinds = [side[name].kind for side in (call.q, call.k) for name in _channelwise(side)]
            self.turned = [
                self.model.trace.pairs.get(name)
                for side in (call.q, call.k)
                for name in _channelwise(side)
            ]
            return Attention(
                q=names["q_proj"],
                k=names["k_proj"],
                v=names["v_proj"],
                o=group.linears[0],
                q_norm=norms[0],
                k_norm=norms[1],
                rotary=Kind.TURNED in kinds,
                cache=self._cache_argument,
            )
        return None

    @cached_property
    def _cache_argument(self) -> str:
        block = self.model.modules[self.prefix[:-1]]
        known = inspect.signature(type(block).forward).parameters
        return next((name for name in CACHES if name in known), CACHES[0])

    def _refused(self, attention: Attention | None) -> dict[str, str]:
        """Methods that look into the attention, which this block's does not let them."""
        if attention is None:
            reason = "its attention is not queries, keys and values of one head size alone"
            return dict.fromkeys(("smooth-attention", "value-basis", "kv"), reason)
        if attention.rotary and not all(self._turns_halves(pairs) for pairs in self.turned):
            reason = "RoPE turns other pairs of channels than those half a head apart"
            return {"smooth-attention": reason}
        forms = [f for n in (attention.q_norm, attention.k_norm) if n and (f := self._form(n))]
        if any(form.biased or form.offset != self.offset for form in forms):
            return {"smooth-attention": "its norms on queries and keys are not those of the block"}
        return {}

    def _turns_halves(self, pairs: torch.Tensor | None) -> bool:
        """Whether RoPE turns channels i and i + R / 2 of the R it turns in a head."""
        heads = self.model.heads
        if pairs is None or heads is None:
            return False
        apart = (pairs[:, 0] - pairs[:, 1]).abs().unique()
        scaling = getattr(self.model.config, "rope_parameters", None) or {}
        kinds = [v for v in scaling.values() if isinstance(v, dict)]  # of several kinds of blocks
        if any(v.get("partial_rotary_factor") for v in kinds):
            return False
        factor = scaling.get("partial_rotary_factor") or _setting(
            self.model.config, "partial_rotary_factor"
        )
        return apart.tolist() == [int(heads.dim * (factor or 1.0)) // 2]

    # the residual stream

    @cached_property
    def _written(self) -> dict[str, Kind]:
        """What is written to the residual stream in this block, directly or through a norm."""
        found: dict[str, Kind] = {}
        for _, facts in self.model.trace.writers:
            for producer, fact in facts.items():
                if not producer.startswith(self.prefix) or fact.channels is None:
                    continue
                found[producer] = fact.kind if _in_order(fact) else Kind.MIXED
                call = next((n for n in self.norms if n.name == producer), None)
                if call is not None:
                    found |= {p: f.kind for p, f in call.facts.items() if f.channels is not None}
        return found

    def _post_norms(self) -> tuple[str, ...]:
        return tuple(self.short(n.name) for n in self.norms if n.name in self._written)

    def _readers(self, groups: list[LinearGroup]) -> dict[str, tuple[str, ...]]:
        """Modules in 16 bit that read a norm which a factor may be folded into."""
        quantized = {name for group in groups for name in group.linears}
        found: dict[str, tuple[str, ...]] = {}
        for group in groups:
            if group.fold is Fold.NORM:
                names = (
                    self.short(r.weight)
                    for r in self.reads
                    if f"{self.prefix}{group.source}" in r.facts
                )
                if others := tuple(dict.fromkeys(n for n in names if n not in quantized)):
                    found[group.source] = others
        return found

    def _check_stream(self, groups: list[LinearGroup]) -> None:
        """Find a reason for which the residual stream cannot be rotated, if there is one."""
        folded = {group.source for group in groups if group.fold is Fold.NORM}
        own = {name for group in groups if group.writes_residual for name in group.linears}
        for read in (*self.reads, *self.experts.values()):
            if STREAM in read.facts:
                return self._fix(f"{self.short(read.weight)} reads it without a norm between")
        for call in self.norms:
            if STREAM in call.facts and self.short(call.name) not in folded:
                return self._fix(f"{self.short(call.name)} is read by more than linears")
        for escape in self.model.trace.escapes.get(STREAM, ()):
            if f"{escape.module}.".startswith(self.prefix):
                where = self.short(escape.module) or "the block itself"
                return self._fix(f"{escape.operation} in {where} reads it")
        for module, facts in self.model.trace.writers:
            if not f"{module}.".startswith(self.prefix):
                continue
            norms = {n.name for n in self.norms} & facts.keys()
            if norms:  # a post-norm, and what it norms
                facts = {p: f for p, f in facts.items() if p in norms}
            known = {p: f for p, f in facts.items() if p.startswith(self.prefix)}
            if not facts or len(known) < len(facts):
                return self._fix("something is added to it that no linear of the block makes")
            for producer, fact in known.items():
                linear = self.short(producer) in own or producer in self.experts
                if producer in norms and fact.kind <= Kind.SUM:
                    continue
                if fact.kind > Kind.SUM or not _in_order(fact) or not linear:
                    return self._fix(
                        f"what {self.short(producer)} writes to it is changed on the way"
                    )
        return None

    def _fix(self, reason: str) -> None:
        self.stream = self.stream or reason

    # tensors

    def _tensors(self, linears: set[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Shapes in words of all tensors of the block, and the linears with a bias."""
        order = {name: i for i, name in enumerate(self.model.trace.called)}
        names = [n for n in self.model.state if n.startswith(self.prefix)]
        names.sort(key=lambda n: order.get(n.rpartition(".")[0], len(order)))
        tensors: dict[str, str] = {}
        biased = []
        for name in names:
            owner, _, part = name.rpartition(".")
            if owner in self.experts:
                continue
            short = name.removeprefix(self.prefix)
            if part == "bias" and self.short(owner) in linears:
                biased.append(self.short(owner))
                continue
            tensors[short] = " ".join(map(str, self.model.state[name]))
        for name in names:
            owner = self.short(name.rpartition(".")[0])
            module = self.model.modules[name.rpartition(".")[0]]
            known = owner in linears or owner in self.kept or isinstance(module, nn.Linear)
            known |= name.rpartition(".")[0] in self.experts
            if len(self.model.state[name]) > 1 and not known:
                self.kept[self.short(name)] = f"{type(module).__name__} is no linear"
        for name in self.experts:
            parts = self._expert_names(name)
            for role, shape, bias in expert_parts(self.model.modules[name]):
                leaf = getattr(parts, role)
                tensors[f"{leaf}.weight"] = " ".join(map(str, shape))
                if bias:
                    biased.append(leaf)
        return tensors, tuple(biased)

    def _expert_names(self, module: str) -> "_ExpertNames":
        base = f"{self.short(module)}.*"
        gate, up, down, _ = self.model.leaves[module]
        return _ExpertNames(gate and f"{base}.{gate}", f"{base}.{up}", f"{base}.{down}")

    def _experts(self, module: str) -> Experts:
        moe = self.short(module).removesuffix(".experts")
        gate, up, down, stacked = self.model.leaves[module]
        stack: Any = self.model.modules[module]
        form = Form.of(stack)
        return Experts(moe, moe, gate, up, down, form.transposed, form.interleaved, stacked)


@dataclass(frozen=True)
class _ExpertNames:
    """Names within a block of the linears of an expert; no ``gate`` where there is none."""

    gate: str | None
    up: str
    down: str


def _unfolded(group: LinearGroup) -> LinearGroup:
    return replace(group, source="", fold=Fold.NONE, gate=None)


def _rows(fact: Fact) -> torch.Tensor:
    """The rows of its producer that a fact takes, in order."""
    assert fact.channels is not None
    rows = fact.channels.flatten().long().unique()
    return rows[rows >= 0]


def _contiguous(rows: torch.Tensor) -> bool:
    return bool((rows == torch.arange(len(rows)) + rows[0]).all())


def _in_order(fact: Fact) -> bool:
    """Whether element c depends on channel c, for every token."""
    channels = fact.channels
    return channels is not None and bool((channels == torch.arange(channels.shape[-1])).all())


def _in_order_of_rows(fact: Fact) -> bool:
    """Whether the elements depend on the fact's rows in their order, for every token."""
    channels, rows = fact.channels, _rows(fact)
    return (
        channels is not None
        and channels.shape[-1] == len(rows)
        and bool((channels == rows.to(channels.dtype)).all())
    )


def _channelwise(facts: Facts) -> list[str]:
    """The producers of which the channels are known."""
    return [p for p, f in facts.items() if f.channels is not None]
