"""Verifies a native checkpoint: hashes, invariants, packed bytes, arithmetic.

For every packed linear: the stored tensors have the declared shapes and dtypes; the scheme's
overflow and range invariants hold; packing the unpacked codes gives the stored bytes again; and the
runtime's output on random activations equals the same integers multiplied in float64.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qtool.errors import CheckFailed, QtoolError
from qtool.format import LinearFormat, native_format, same_bytes
from qtool.format.linear import CODES
from qtool.format.stored_linears import packed_names
from qtool.io.integrity import (
    CHANGED,
    INDEX,
    changed_beside_shards,
    damaged_shards,
    recorded_hashes,
)
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.torch_defaults import torch_defaults
from qtool.progress import Progress
from qtool.runtime.device import require_device
from qtool.runtime.dispatch import Kernel
from qtool.runtime.linear import QuantLinear
from qtool.runtime.packed_kv import IMPORTANCE, OFFSET, missing_kv_tensors
from qtool.runtime.read_linear import load_linear

#: random inputs of each linear
TOKENS = 8
#: float32 epilogue (three multiplications, G additions) against float64
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Verified:
    """The outcome for one linear, or for one file.

    Attributes:
        name: name of the linear's module, or of the file.
        problem: a sentence on what is wrong; empty if all checks passed.
        ran: the arithmetic that computed the output.
        error: relative distance (Frobenius) of the output from the float64 reference.
    """

    name: str
    problem: str = ""
    ran: str = ""
    error: float = 0.0


def verify(
    directory: Path, *, device: str | torch.device = "cpu", progress: Progress | None = None
) -> Iterator[Verified]:
    """Check config.json, index, tokenizer, shards and packed linears of a native checkpoint.

    A checkpoint in which nothing is quantized is a problem too. If the index or a shard is missing
    or cannot be read, only files are checked.

    Args:
        progress: called after each linear with (done, total, notes).

    Raises:
        QtoolError: ``directory`` is no native checkpoint, or the device does not exist.
    """
    where = require_device(device)
    changed = [*changed_beside_shards(directory), *damaged_shards(directory)]
    try:
        checkpoint = Checkpoint(directory)
    except QtoolError as error:
        if not (changed and recorded_hashes(directory)):
            raise
        yield from (Verified(file, problem) for file, problem in changed)
        if (INDEX, CHANGED) in changed:
            yield Verified(str(directory), str(error))  # it may name the tensor that was edited
        return
    checkpoint_format = native_format(checkpoint.config)
    yield from (Verified(file, problem) for file, problem in changed)
    yield from _kv_tensors(checkpoint, checkpoint_format.kv)
    stored = packed_names(checkpoint)
    family = family_of(checkpoint.config)
    linears = family.all_linears(family.settings(checkpoint.config))
    names = dict.fromkeys((*stored, *filter(checkpoint_format.of, linears)))
    if not names and checkpoint_format.kv is None:
        yield Verified(str(directory), "no linear is packed, so nothing was verified")
    for number, name in enumerate(names, 1):
        yield _linear(checkpoint, name, checkpoint_format.of(name), where)
        if progress:
            progress(number, len(names), {})


def _linear(
    checkpoint: Checkpoint, name: str, linear_format: LinearFormat | None, device: torch.device
) -> Verified:
    """The outcome for the linear ``name``, which the config has in ``linear_format``."""
    if linear_format is None:
        return Verified(name, "stored packed, but quantization_config leaves it in 16 bits")
    if f"{name}.{CODES}" not in checkpoint:
        return Verified(name, "quantization_config has it packed, but it is not stored so")
    try:
        return _packed(checkpoint, name, linear_format, device)
    except QtoolError as error:
        return Verified(name, str(error))


def _kv_tensors(checkpoint: Checkpoint, kv: str | None) -> Iterator[Verified]:
    try:
        missing = missing_kv_tensors(kv, checkpoint.config, checkpoint.entries)
    except QtoolError as error:
        yield Verified("quantization_config", str(error))
        return
    yield from (Verified(name, "a tensor of the KV cache is missing") for name in missing)
    for name in checkpoint.entries:
        if name.endswith((".k_scale", ".v_scale", f".{IMPORTANCE}")):
            scale = checkpoint.read(name)
            if not (torch.isfinite(scale).all() and (scale > 0).all()):
                yield Verified(
                    name, "a scale or importance of the KV cache is not a positive number"
                )
        elif name.endswith(f".{OFFSET}") and not torch.isfinite(checkpoint.read(name)).all():
            yield Verified(name, "a key offset of the KV cache is not a finite number")


@torch_defaults()
@torch.no_grad()
def _packed(
    checkpoint: Checkpoint, name: str, linear_format: LinearFormat, device: torch.device
) -> Verified:
    """The outcome for a packed linear.

    Raises:
        QtoolError: a check failed, or the linear cannot be loaded.
    """
    linear = load_linear(checkpoint, name, linear_format, device)
    scheme = linear_format.scheme_object
    codes, params = linear.unpack()
    scheme.check(codes, params)
    for part, tensor in linear_format.pack(codes, params).items():
        if not same_bytes(tensor, linear.stored()[part]):
            raise CheckFailed(f"packing the unpacked {part} does not give the stored bytes")
    if linear.permutation is not None and not torch.equal(
        linear.permutation.sort().values.cpu(), torch.arange(linear.in_features, dtype=torch.int32)
    ):
        raise CheckFailed("the input permutation is not a permutation")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, linear.in_features, generator=generator).to(device)
    if kernel := linear.kernel(device, x.dtype) or linear.kernel(device, torch.bfloat16):
        x = x.to(x.dtype if x.dtype in kernel.dtypes else torch.bfloat16)
        ran = f"{kernel.name} on {torch.cuda.get_device_name(device)}, {kernel.precision}"
        y, tolerance = linear.multiply(x, kernel, torch.float32), kernel.tolerance
        if kernel.exact:
            _require_equal_sums(linear, x, kernel)
    else:
        ran = f"{scheme.name} reference, {_precision(linear_format)}"
        y, tolerance = linear(x), TOLERANCE
    error = relative_distance(y, _reference(linear, x, codes, params))
    problem = (
        "" if error <= tolerance else f"output differs from the float64 reference by {error:.1e}"
    )
    return Verified(name, problem, ran, error)


def _require_equal_sums(linear: QuantLinear, x: Tensor, kernel: Kernel) -> None:
    """Check that all int32 sums of the kernel equal those of the CPU reference."""
    found = linear.multiply(x, kernel, torch.int32).cpu()
    reference = copy.deepcopy(linear).cpu()
    expected = reference.multiply(x.cpu(), kernel, torch.int32)
    if not torch.equal(found, expected):
        raise CheckFailed(
            f"{kernel.name}: {int((found != expected).sum())} of {found.numel()} int32 sums "
            "are wrong"
        )


def _reference(linear: QuantLinear, x: Tensor, codes: Tensor, params: dict[str, Tensor]) -> Tensor:
    scheme = linear.format.scheme_object
    # x has 16 bits for kernels that take nothing else, and their rearranged input is rounded to it
    arranged = linear.arranged(x).to(x.dtype)
    y = (
        scheme.fake_activation(arranged.float(), params).double()
        @ scheme.dequantize(codes, params).double().t()
    )
    return y if linear.bias is None else y + linear.bias.double()


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """``||found - expected|| / ||expected||`` (Frobenius)."""
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def _precision(linear_format: LinearFormat) -> str:
    scheme = linear_format.scheme_object
    if not type(scheme).matmul.__module__.startswith("qtool."):
        return "its own matmul"  # of another package: how it computes is not known
    if scheme.activation.bits == 16:
        return f"int{scheme.code_bits} weights, 16-bit activations, float32 sums"
    weight_bits = 8 if scheme.activation.bits == 8 else scheme.code_bits
    return f"int{scheme.activation.bits} x int{weight_bits}, int32 sums"
