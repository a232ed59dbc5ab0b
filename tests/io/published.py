"""Random models in the formats that models are published in, each beside its plain twin.

Codes are drawn; the twin has what the library that defines the format makes of them.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.tiny import save_tiny

Tensors = dict[str, Tensor]
#: ``encode(name, weight) -> (stored tensors, the plain weight)``
Encode = Callable[[str, Tensor], tuple[Tensors, Tensor]]
LINEAR = re.compile(r"model\.layers\.\d+\..*proj(_with_mqa)?\.weight")
STACK = re.compile(r".*\.experts\.(gate_up|down)_proj")


def pair(
    directory: Path, model_type: str, encode: Encode, quantization: dict[str, Any], **changes: Any
) -> tuple[Path, Path]:
    """``(published, plain)``: a random model with its linears encoded, and as they decode."""
    plain, published = directory / "plain", directory / "published"
    save_tiny(model_type, plain, dtype="bfloat16", **changes)
    tensors = {n: t.to(torch.bfloat16) for n, t in load_file(plain / "model.safetensors").items()}
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if (STACK if encode is mxfp4 else LINEAR).fullmatch(name):
            parts, tensors[name] = encode(name, tensor)
            stored |= parts
        else:
            stored[name] = tensor
    assert len(stored) > len(tensors), "no weight of the model is encoded"
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(config))
    shutil.copytree(plain, published, ignore=shutil.ignore_patterns("*.safetensors"))
    config["quantization_config"] = quantization
    (published / "config.json").write_text(json.dumps(config))
    _in_two_files(published, stored)
    return published, plain


def _in_two_files(directory: Path, tensors: Tensors) -> None:
    """Save ``tensors``, every other one in another file: codes and scales are apart."""
    names = sorted(tensors)
    files = {f"model-{n + 1}-of-2.safetensors": names[n::2] for n in range(2)}
    for file, own in files.items():
        save_file({n: tensors[n].contiguous() for n in own}, directory / file, {"format": "pt"})
    weight_map = {name: file for file, own in files.items() for name in own}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def codes(shape: tuple[int, ...]) -> Tensor:
    """Random float8_e4m3fn codes, all finite ones."""
    magnitude = torch.randint(0, 127, shape, dtype=torch.uint8)
    sign = torch.randint(0, 2, shape, dtype=torch.uint8) << 7
    return (magnitude | sign).view(torch.float8_e4m3fn)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) * 1e-3 + 1e-5


def grid(weight: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    return -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])


def fp8_in_blocks(block: tuple[int, int], judge: str = "transformers") -> Encode:
    """``weight`` and ``weight_scale_inv``; transformers decodes only blocks that divide."""

    def encode(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        stored, scale = codes(tuple(weight.shape)), scales(*grid(weight, block))
        if judge == "transformers":
            plain = Fp8Dequantize(None)._dequantize_one(stored, scale, torch.bfloat16)
        else:
            args = dict(num_bits=8, type="float", strategy="block", block_structure=list(block))
            plain = decompressed("float-quantized", args, weight=stored, weight_scale=scale)
        return {name: stored, f"{name}_scale_inv": scale}, plain

    return encode


def fp8(scale_of: Callable[[str], str], scale: Callable[[int, int], Tensor], half: bool) -> Encode:
    """Other names, shapes and dtypes of scales; ``half``: codes of 4 bits, two a byte."""

    def encode(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        stored = codes((n, k))
        if half:
            stored = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
        found = scale(n, k)
        plain = Fp8Dequantize(None)._dequantize_one(stored, found, torch.bfloat16)
        return {name: stored, scale_of(name): found}, plain

    return encode


def powers_of_two(*shape: int) -> Tensor:
    return torch.randint(110, 125, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def mxfp4(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """GPT-OSS: of ``weight [E, K, N]`` the blocks ``[E, N, K / 32, 16]``."""
    e, k, n = weight.shape
    blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 125, (e, n, k // 32), dtype=torch.uint8)
    plain = convert_moe_packed_tensors(blocks, exponents)
    return {f"{name}_blocks": blocks, f"{name}_scales": exponents}, plain


def compressed(format: str, **weights: Any) -> tuple[Encode, dict[str, Any]]:
    """A compressed-tensors format, and its ``quantization_config``."""
    args = {"type": "float", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
    }

    def encode(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        module, (n, k) = name.removesuffix(".weight"), weight.shape
        if args["num_bits"] == 8:
            block = {"tensor": (n, k), "channel": (1, k)}.get(args["strategy"])
            block = block or tuple(args["block_structure"])
            scale = scales(*grid(weight, block)).to(torch.bfloat16)
            parts = {"weight": codes((n, k)), "weight_scale": scale}
            if args["strategy"] == "tensor":
                parts["weight_scale"] = scale.reshape(1)
        else:
            packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
            parts = {"weight_packed": packed}
            if format.startswith("nvfp4"):
                parts["weight_scale"] = codes((n, k // 16)).float().abs().to(torch.float8_e4m3fn)
                parts["weight_global_scale"] = torch.rand(1) * 1000 + 1000
            else:
                parts["weight_scale"] = torch.randint(110, 125, (n, k // 32), dtype=torch.uint8)
        plain = decompressed(format, args, **parts)
        unread = {"input_scale": torch.ones(1)} if args["num_bits"] == 8 else {}
        return {f"{module}.{p}": t for p, t in (parts | unread).items()}, plain

    return encode, config


def decompressed(format: str, args: dict[str, Any], **parts: Tensor) -> Tensor:
    """The weight that compressed-tensors makes of a linear's tensors, in bfloat16."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(format)
    weight: Tensor = compressor.decompress(parts, scheme)["weight"]
    return weight.to(torch.bfloat16)


def _case(model_type: str, encode: Encode, quantization: dict[str, Any], **changes: Any) -> Any:
    return SimpleNamespace(
        make=lambda directory: pair(directory, model_type, encode, quantization, **changes)
    )


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
EDGES = {**FP8, "weight_block_size": [96, 80]}
CASES = {
    "fp8": _case("llama", fp8_in_blocks((128, 128)), FP8),
    "fp8-edges": _case("llama", fp8_in_blocks((96, 80), "compressed-tensors"), EDGES),
    "fp8-a-matrix": _case(
        "llama",
        fp8(lambda n: f"{n}_scale_inv", lambda n, k: scales(1).squeeze().bfloat16(), half=False),
        {**FP8, "activation_scheme": "static", "weight_block_size": None},
    ),
    "fp8-a-row": _case(
        "llama",
        fp8(lambda n: f"{n}_scale", lambda n, k: scales(n, 1), half=False),
        {"quant_method": "fp8"},
    ),
    "fp8-ue8m0": _case(
        "llama",
        fp8(lambda n: f"{n}_scale_inv", lambda n, k: powers_of_two(n // 64, k // 64), half=False),
        {**FP8, "weight_block_size": [64, 64], "scale_fmt": "ue8m0"},
    ),
    "fp8-with-fp4": _case(
        "llama",
        fp8(
            lambda n: n.replace(".weight", ".scale"),
            lambda n, k: powers_of_two(n, k // 32),
            half=True,
        ),
        {**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    ),
    "fp8-deepseek": _case("deepseek_v3", fp8_in_blocks((96, 80), "compressed-tensors"), EDGES),
    "mxfp4-gpt-oss": _case("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
    "ct-tensor": _case("llama", *compressed("float-quantized", num_bits=8, strategy="tensor")),
    "ct-channel": _case("llama", *compressed("float-quantized", num_bits=8, strategy="channel")),
    "ct-block": _case(
        "llama",
        *compressed("float-quantized", num_bits=8, strategy="block", block_structure=[96, 80]),
    ),
    "ct-nvfp4": _case(
        "llama",
        *compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
    ),
    "ct-mxfp4": _case(
        "llama",
        *compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
}
