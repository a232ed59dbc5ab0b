"""Load exports with vLLM's own loaders and compare every linear with ours: names, shapes, fusion,
tensor values.

    python benchmarks/serving/through_vllm.py NATIVE EXPORT [EXPORT ...]

Kernels do not run, so no GPU is needed: vLLM is told that it is on a GPU of compute capability 9.0,
builds the model, chooses each layer's scheme and kernel, and loads the checkpoint into its fused
parameters. These are read back here, by the formats' closed forms, and compared with qtool's
weights. The printed kernel is the one that vLLM would choose on an H200.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qtool.format import native_format
from qtool.format.stored_linears import packed_names
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.parts import Experts
from qtool.runtime.read_linear import load_linear

AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def built(directory: Path) -> torch.nn.Module:
    """vLLM's model of ``directory`` with its weights loaded."""
    _on_a_cpu()
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=str(directory), enforce_eager=True, max_model_len=64
    ).create_engine_config()
    with set_current_vllm_config(config):
        _one_process()
        real, current_platform._enum = current_platform._enum, PlatformEnum.CUDA
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        current_platform._enum = real
        loader = get_model_loader(config.load_config)
        model.load_weights(loader.get_all_weights(config.model_config, model))
    return model


def _on_a_cpu() -> None:
    """The platform, where vLLM found none: on a machine without a GPU its CUDA wheel does not take
    the CPU for one.
    """
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    if not platforms.current_platform.device_type:
        platforms._current_platform = platforms.current_platform = CpuPlatform()
        # the platform itself would refuse an fp8 cache
        attention = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
        CpuPlatform.get_attn_backend_cls = lambda *_, **__: attention


def _one_process() -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    if torch.distributed.is_initialized():
        return
    init_distributed_environment(1, 0, "tcp://127.0.0.1:29577", 0, backend="gloo")
    initialize_model_parallel(1, 1)

    def ninety(capability: Any) -> int:
        return capability if isinstance(capability, int) else 10 * capability[0] + capability[1]

    current_platform.get_device_capability = lambda device_id=0: DeviceCapability(9, 0)
    current_platform.has_device_capability = lambda capability, device_id=0: (
        ninety(capability) <= 90
    )
    current_platform.is_device_capability = lambda capability, device_id=0: ninety(capability) == 90
    lookup = torch._ops._OpNamespace.__getattr__

    def absent(namespace: Any, name: str) -> Any:  # a wheel without its compiled part
        try:
            return lookup(namespace, name)
        except AttributeError:
            if namespace.name.startswith(("_C", "_moe_C")) and not name.startswith("__"):
                return lambda *_, **__: None
            raise

    torch._ops._OpNamespace.__getattr__ = absent  # type: ignore[method-assign]


def nibbles(words: Tensor, axis: int) -> Tensor:
    """int32 words along ``axis`` as eight codes each, the lowest nibble first."""
    shape = [1] * (words.dim() + 1)
    shape[axis + 1] = 8
    return ((words.unsqueeze(axis + 1) >> torch.arange(0, 32, 4).view(shape)) & 15).flatten(
        axis, axis + 1
    )


def weight(parameters: Mapping[str, Tensor], export: str) -> Tensor:
    """The weight ``[N, K]`` of a loaded module in float32."""
    if "weight_packed" in parameters:
        codes, scale = nibbles(parameters["weight_packed"], 1), parameters["weight_scale"].float()
        packed = parameters.get("weight_zero_point")
        zero = torch.full_like(scale, 8) if packed is None else nibbles(packed, 0).float()
        size = codes.shape[1] // scale.shape[1]
        return (codes - zero.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)
    if "weight_scale" in parameters:
        return parameters["weight"].float() * parameters["weight_scale"].float().view(-1, 1)
    scale = parameters["scales"].float()
    if export == "awq":
        codes, zero = (
            nibbles(parameters[part], 1).unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)
            for part in ("qweight", "qzeros")
        )
    else:
        codes = nibbles(parameters["qweight"], 0)
        zero = nibbles(parameters["qzeros"], 1) + (export == "gptq")
    size = codes.shape[0] // scale.shape[0]
    return ((codes - zero.repeat_interleave(size, 0)) * scale.repeat_interleave(size, 0)).t()


def quantized(
    model: torch.nn.Module, experts: Experts | None
) -> Iterator[tuple[Any, dict[str, Tensor], list[str]]]:
    """Each quantized module, its parameters and the names of its linears; a stack of experts comes
    one by one.
    """
    packed = getattr(model, "packed_modules_mapping", None) or {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own.keys() & {"weight_packed", "qweight"} or own.keys() >= {"weight", "weight_scale"}:
            parent, _, last = name.rpartition(".")
            yield module, own, [f"{parent}.{part}" for part in packed.get(last, [last])]
        stacks = (
            {"w13": ("gate", "up"), "w2": ("down",)}
            if any(part.startswith("w13_") for part in own)
            else {}
        )
        for stack, roles in stacks.items():
            parts = {
                part.removeprefix(stack + "_"): t
                for part, t in own.items()
                if part.startswith(stack + "_")
            }
            for number in range(len(next(iter(parts.values())))):
                expert = f"{name.partition('.experts')[0]}.experts.{number}"
                names = [f"{expert}.{getattr(experts, role)}" for role in roles]
                yield module, {part: tensor[number] for part, tensor in parts.items()}, names


def ours(native: Path) -> dict[str, Tensor]:
    """Our weights by name; the rows of a fused linear are in vLLM's order query, key, value."""
    checkpoint = Checkpoint(native)
    checkpoint_format = native_format(checkpoint.config)
    family = family_of(checkpoint.config)
    settings: SimpleNamespace = family.settings(checkpoint.config)
    found = {}
    for name in packed_names(checkpoint):
        linear_format = checkpoint_format.of(name)
        assert linear_format is not None
        found[name] = load_linear(checkpoint, name, linear_format, torch.device("cpu")).dequantize()
        within = name.removeprefix(family.blocks + ".").partition(".")[2]
        if family.fused_by_head and within in family.fused:
            found[name] = torch.cat(
                [found[name][family.rows(part, settings)] for part in family.fused[within]]
            )
    return found


def main(native: Path, exports: list[Path]) -> None:
    """Print a line for each export."""
    expected = ours(native)
    experts = family_of(Checkpoint(native).config).experts
    for directory in exports:
        quantization = Checkpoint(directory).config["quantization_config"]
        export = quantization.get("checkpoint_format") or quantization["quant_method"]
        worst, kernels, seen = 0.0, set(), set()
        for module, parameters, linears in quantized(built(directory), experts):
            wanted = torch.cat([expected[linear] for linear in linears])
            worst = max(worst, float((weight(parameters, export) - wanted).norm() / wanted.norm()))
            kernels.add(kernel_of(module))
            seen.update(linears)
        assert seen == expected.keys(), (
            f"{directory}: vLLM has no module of {min(expected.keys() - seen)}"
        )
        line = (
            f"{len(seen)} linears loaded, largest relative distance {worst:.1e}; "
            f"{', '.join(sorted(kernels))}"
        )
        print(f"{directory.name}: {line}", flush=True)


def kernel_of(module: Any) -> str:
    """The kernel of a linear, or the method of a stack of experts."""
    owners = (module, getattr(module, "scheme", None), module.quant_method)
    kernel = next(
        (found for owner in owners if (found := getattr(owner, "kernel", None))),
        module.quant_method,
    )
    return type(kernel).__name__


if __name__ == "__main__":
    if find_spec("vllm") is None:
        sys.exit("through_vllm.py: vLLM is not installed; make test-serving installs it")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
