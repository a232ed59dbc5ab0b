"""What vLLM's loaders ask of a checkpoint: rules over config.json and the shards' headers, no code
of theirs or ours.

Read in vLLM 0.33.0 (``layers/quantization``: compressed_tensors, auto_gptq, auto_awq;
``layers/linear.py``, ``fused_moe``), and confirmed by running its loaders
(benchmarks/serving/through_vllm.py). A module is one linear of theirs: q, k, v are one, gate and up
are one, all experts of a block are one. For each module

- the config says of every linear of it whether, and how, it is quantized, and says the same;
- each quantized linear has exactly the tensors of its format, with the right dtype and shape; each
  other a weight;
- routers are linears to some of its models (Qwen3-MoE): the config must leave them out;
- what is packed along N can be cut where the module's linears meet.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: modules of the blocks that are no quantizable linears
PLAIN = re.compile(r"norm|embed|lm_head|\.(gate|shared_expert_gate)$|ln_")
ROUTER = re.compile(r"\.(gate|shared_expert_gate)$")
FLOATS = {"F16", "BF16", "F32"}
Tensors = Mapping[str, tuple[set[str], tuple[int, ...]]]


@dataclass(frozen=True)
class Stored:
    """A linear's format: what must be equal within a module, and its tensors for a weight ``[n,
    k]``.
    """

    kind: tuple[Any, ...]
    tensors: Callable[[int, int], Tensors]
    #: N of each linear is a multiple of this
    cut: int = 1


def headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """``(dtype, shape)`` of every tensor; index and shards agree."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found, nbytes = {}, 0
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(directory / shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                assert index["weight_map"][name] == shard, (
                    f"{name} lies in {shard}, the index says otherwise"
                )
                piece = file.get_slice(name)
                found[name] = piece.get_dtype(), tuple(piece.get_shape())
                nbytes += file.get_tensor(name).nbytes
    assert found.keys() == index["weight_map"].keys()
    assert nbytes == index["metadata"]["total_size"]
    return found


def modules(source: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """The linears of each module, from the names and shapes of the unquantized model."""
    found: dict[str, list[str]] = {}
    for tensor, shape in source.items():
        name = tensor.removesuffix(".weight")
        if len(shape) != 2 or name == tensor or PLAIN.search(name):
            continue
        parent, _, last = name.rpartition(".")
        fused = next((group for group in FUSED if last in group), (last,))
        module = (
            f"{parent}.{'+'.join(fused)}"
            if "experts." not in name
            else parent.split("experts.")[0] + "experts"
        )
        found.setdefault(module, []).append(name)
    return found


def check(directory: Path, source: Mapping[str, tuple[int, ...]]) -> int:
    """Assert every rule; returns how many modules are quantized."""
    config, found = json.loads((directory / "config.json").read_text()), headers(directory)
    quantization = config["quantization_config"]
    stored = {"compressed-tensors": compressed, "gptq": gptq, "awq": awq}[
        quantization["quant_method"]
    ](quantization)
    known, quantized = set(), 0
    for name in (tensor.removesuffix(".weight") for tensor in source):
        assert not ROUTER.search(name) or stored(name) is None, (
            f"{name}: vLLM would quantize the router"
        )
    for module, linears in modules(source).items():
        kinds = [stored(name) for name in linears]
        assert len({kind.kind if kind else None for kind in kinds}) == 1, (
            f"{module}: its linears are stored unlike"
        )
        for name, kind in zip(linears, kinds, strict=True):
            n, k = source[f"{name}.weight"]
            expected: Tensors = {"weight": (FLOATS, (n, k))} if kind is None else kind.tensors(n, k)
            assert kind is None or n % kind.cut == 0, (
                f"{name}: {n} rows cannot be cut at {kind.cut}"
            )
            for part, (dtypes, shape) in expected.items():
                dtype, actual = found[f"{name}.{part}"]
                assert dtype in dtypes and actual == shape, (
                    f"{name}.{part}: {dtype} {actual}, expected {dtypes} {shape}"
                )
                known.add(f"{name}.{part}")
        quantized += kinds[0] is not None
    rest = found.keys() - known
    scales = {name for name in rest if name.endswith((".k_scale", ".v_scale"))}
    for name in scales:
        assert name.split(".")[-2] in ("self_attn", "self_attention") and found[name] == (
            "F32",
            (1,),
        )
    if quantization.get("kv_cache_scheme"):
        scheme = quantization["kv_cache_scheme"]
        assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, "float", "tensor")
        assert (
            scheme["symmetric"]
            and not scheme["dynamic"]
            and len(scales) == 2 * config["num_hidden_layers"]
        )
    else:
        assert not scales
    unknown = {name for name in rest - scales if name not in source and name != "lm_head.weight"}
    assert not unknown, f"tensors no loader knows: {sorted(unknown)[:3]}"
    assert all(
        found[name][0] in FLOATS and found[name][1] == source.get(name, found[name][1])
        for name in rest - scales
    )
    assert source.keys() <= known | rest | {
        f"{name}.weight" for each in modules(source).values() for name in each
    }
    assert "lm_head.weight" in found or config["tie_word_embeddings"]
    return quantized


def compressed(config: Mapping[str, Any]) -> Callable[[str], Stored | None]:
    """The first group whose targets match, unless the name is ignored."""
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.ignore is not None and "lm_head" in parsed.ignore

    def matches(name: str, target: str) -> bool:
        return (
            bool(re.match(target[3:], name))
            if target.startswith("re:")
            else target in (name, "Linear")
        )

    def stored(name: str) -> Stored | None:
        if any(entry == name for entry in parsed.ignore or ()):
            return None
        groups = [
            group
            for group in parsed.config_groups.values()
            if any(matches(name, t) for t in group.targets)
        ]
        assert len(groups) == 1, f"{name} is the target of {len(groups)} groups"
        weights = groups[0].weights
        inputs = groups[0].input_activations
        kind = groups[0].format or parsed.format
        size = weights.group_size if weights.strategy == "group" else None
        facts = (
            kind,
            weights.num_bits,
            size,
            weights.symmetric,
            inputs and (inputs.num_bits, inputs.type),
        )
        if kind == "int-quantized":
            assert (weights.num_bits, weights.symmetric, size) == (8, True, None)
            assert inputs and inputs.dynamic and inputs.strategy == "token" and inputs.symmetric
            return Stored(
                facts, lambda n, k: {"weight": ({"I8"}, (n, k)), "weight_scale": (FLOATS, (n, 1))}
            )
        assert kind == "pack-quantized" and weights.num_bits == 4 and size in (None, 32, 64, 128)

        def tensors(n: int, k: int) -> Tensors:
            assert k % 8 == 0 and k % (size or k) == 0
            groups = k // (size or k)
            zeros: Tensors = (
                {} if weights.symmetric else {"weight_zero_point": ({"I32"}, (n // 8, groups))}
            )
            packed: Tensors = {
                "weight_packed": ({"I32"}, (n, k // 8)),
                "weight_scale": (FLOATS, (n, groups)),
            }
            return {**packed, "weight_shape": ({"I64"}, (2,)), **zeros}

        return Stored(facts, tensors, cut=1 if weights.symmetric else 8)

    return stored


def gptq(config: Mapping[str, Any]) -> Callable[[str], Stored | None]:
    """Everything, unless a rule ``-:`` of ``dynamic`` matches from the name's beginning."""
    assert (config["bits"], config["sym"], config["desc_act"], config["lm_head"]) == (
        4,
        True,
        False,
        False,
    )
    assert config["checkpoint_format"] in ("gptq", "gptq_v2") and config["group_size"] in (
        -1,
        32,
        64,
        128,
    )
    assert all(rule.startswith("-:") for rule in config["dynamic"])

    def tensors(n: int, k: int) -> Tensors:
        groups = k // config["group_size"] if config["group_size"] > 0 else 1
        shapes: dict[str, tuple[set[str], tuple[int, ...]]] = {
            "qweight": ({"I32"}, (k // 8, n)),
            "g_idx": ({"I32"}, (k,)),
        }
        return {**shapes, "qzeros": ({"I32"}, (groups, n // 8)), "scales": (FLOATS, (groups, n))}

    def stored(name: str) -> Stored | None:
        skipped = any(re.match(rule[2:], name) for rule in config["dynamic"])
        return None if skipped else Stored(("gptq",), tensors, cut=8)

    return stored


def awq(config: Mapping[str, Any]) -> Callable[[str], Stored | None]:
    """Everything, unless an entry of ``modules_to_not_convert`` is part of the name."""
    assert (config["bits"], config["zero_point"], config["version"]) == (4, True, "gemm")
    assert config["group_size"] in (-1, 32, 64, 128)

    def tensors(n: int, k: int) -> Tensors:
        groups = k // config["group_size"] if config["group_size"] > 0 else 1
        packed: Tensors = {"qweight": ({"I32"}, (k, n // 8)), "qzeros": ({"I32"}, (groups, n // 8))}
        return {**packed, "scales": (FLOATS, (groups, n))}

    def stored(name: str) -> Stored | None:
        if any(entry in name for entry in config["modules_to_not_convert"]):
            return None
        assert "experts" not in name or config["group_size"] > 0, "experts have groups"
        return Stored(("awq",), tensors, cut=8)

    return stored
