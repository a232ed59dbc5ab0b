"""The direct launches of a linear, without a GPU: the parameter blocks are those of the ops.

Kernels are not loaded, and a launch is noted instead: its kernel, grid, block and parameters.
"""

import ctypes
import gc
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.kernels import launch as launching
from qtool.kernels.activation.quantize_activation import PARAMETERS as ROW
from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.activation.quantize_residual_norm import quantize_residual_norm
from qtool.kernels.attention import kv_attention
from qtool.kernels.attention.kv_append_paged import kv_append_paged
from qtool.kernels.attention.kv_attention_paged import kv_attention_paged
from qtool.kernels.attention.paged_cache import head_bytes
from qtool.kernels.experts.w4a16 import w4a16_experts_gemm
from qtool.kernels.hopper.gemm import PARAMETERS as GEMM
from qtool.kernels.hopper.gemm import definition
from qtool.kernels.hopper.tiles import choose_half, choose_s4
from qtool.kernels.hopper.w4a8 import w4a8_gemm
from qtool.kernels.hopper.w4ax import operand as w4ax_operand
from qtool.kernels.hopper.w4ax import w4ax_gemm
from qtool.kernels.hopper.w8a8 import w8a8_gemm
from qtool.kernels.mma.gemm import PARAMETERS as MMA
from qtool.kernels.mma.half_gemm import PARAMETERS as HALF
from qtool.kernels.mma.w4a8 import w4a8_mma_gemm
from qtool.kernels.mma.w4a16 import w4a16_24_gemm, w4a16_gemm
from qtool.kernels.mma.w4ax import w4ax_mma_gemm
from qtool.kernels.op import OPERATORS
from qtool.kernels.order import groups_in_order
from qtool.runtime.dispatch import KERNELS, Call
from tests.kernels import test_mma as mma
from tests.kernels import test_w4ax as w4ax
from tests.kernels.launched import launched
from tests.runtime.test_linear import quantized

#: kernel, blocks, threads, shared bytes, parameters
Launch = tuple[int, int, int, int, bytes]
FORMATS = [("w4a8-lqq", "dual-mma"), ("w4a8-qoq", "dual-mma"), ("w8a8", "row-major-8")]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Every launch, on a Hopper GPU that is not there."""
    noted: list[Launch] = []

    def note(*launch: Any, device: Any = None, overlap: bool) -> None:
        noted.append(launch[:5])

    def handle(code: str, entry: str, *_: Any) -> int:
        return hash((code, entry))

    def tensor_map(*matrix: int) -> bytes:
        return struct.pack("<7q", *matrix)

    replaced: dict[str, Callable[..., Any]] = {
        "launch": note,
        "load": handle,
        "cubin": lambda *source: repr(source),
        "compute_capability": lambda device: (9, 0),
        "multiprocessors": lambda device: 132,
        "resident_blocks": lambda *kernel: 2,
        "_tensor_map": tensor_map,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("qtool.kernels"):
            for function, stand_in in replaced.items():
                if callable(getattr(module, function, None)) and function in vars(module):
                    monkeypatch.setattr(module, function, stand_in)
            if hasattr(getattr(module, "_kernel", None), "cache_clear"):
                module._kernel.cache_clear()
    yield noted
    for name, module in list(sys.modules.items()):
        if name.startswith("qtool.kernels") and hasattr(module, "_kernel"):
            module._kernel.cache_clear()


def case(scheme: str, layout: str, m: int, normed: bool = False, rotated: bool = False) -> Call:
    """A call of a packed linear with bias and permutation, and with an RMSNorm if ``normed``."""
    torch.manual_seed(0)
    linear = quantized(scheme, layout, torch.randn(192, 256), permuted=True)
    linear.format = replace(linear.format, rotated=rotated)
    linear.permutation.copy_(torch.randperm(256))  # type: ignore[union-attr]
    x = torch.randn(m, 256).bfloat16()
    linear.norm = (torch.randn(256).bfloat16(), 1e-5) if normed else None
    return linear._call(x, torch.bfloat16)


@pytest.mark.parametrize(
    ("m", "normed", "rotated"), [(1, False, True), (16, True, False), (200, False, False)]
)
@pytest.mark.parametrize(("scheme", "layout"), FORMATS)
def test_direct_launches_are_those_of_the_ops(
    scheme: str, layout: str, m: int, normed: bool, rotated: bool, launches: list[Launch]
) -> None:
    call = case(scheme, layout, m, normed, rotated)
    kernel = KERNELS[scheme, layout][0]
    assert kernel.prepare is not None
    prepared = kernel.prepare(call)
    out = prepared(call.x)
    assert out.shape == (m, 192) and out.dtype == torch.bfloat16
    direct = list(launches)
    launches.clear()
    through_ops(call)
    assert [launch[:4] for launch in direct] == [launch[:4] for launch in launches]
    (rows, gemm), (rows_of_op, gemm_of_op) = (
        [each[4] for each in both] for both in (direct, launches)
    )
    # pointers of outputs differ; what is read, and every number, does not
    read, written = slice(0, 5), slice(5, 8)
    found, expected = ROW.unpack(rows), ROW.unpack(rows_of_op)
    assert found[read] == expected[read] and found[8:] == expected[8:]
    assert found[8:10] == (m, 256) and (found[4] != 0) == normed
    codes, scale, total = found[written]
    found, expected = GEMM.unpack(gemm), GEMM.unpack(gemm_of_op)
    assert found[1:8] == expected[1:8] and found[11:] == expected[11:]
    assert found[8] == scale and found[9] in (total, 0) and found[10] == out.data_ptr()
    assert struct.unpack_from("<7q", found[0])[0] == codes
    assert struct.unpack_from("<7q", found[0])[1:] == struct.unpack_from("<7q", expected[0])[1:]
    assert codes % 16 == scale % 16 == total % 16 == 0 and codes + m * 256 <= scale
    assert scale + 4 * m <= total


def through_ops(call: Call) -> Tensor:
    """The same linear by the ops' CUDA implementations."""
    from qtool.runtime.dispatch import _w4a8_tensors

    fusion = "none" if call.norm is None else "rms-norm"
    how = (call.norm, fusion, call.epsilon, call.format.rotated)
    codes, scale, total = launched(quantize_activation, call.x, call.permutation, *how)
    if call.format.scheme == "w8a8":
        weight, channel = call.stored["qweight"].view(torch.int8), call.stored["scale"][:, 0]
        return launched(w8a8_gemm, codes, scale, weight, channel, call.bias, call.out_dtype)
    tensors = _w4a8_tensors(call.stored)
    variant = (call.format.scheme, call.format.group_size, call.out_dtype)
    return launched(w4a8_gemm, codes, scale, *tensors, total, call.bias, *variant)


def test_buffers_are_kept_by_the_inputs_shape(launches: list[Launch]) -> None:
    call = case(*FORMATS[0], 4)
    assert KERNELS[FORMATS[0]][0].prepare is not None
    prepared = KERNELS[FORMATS[0]][0].prepare(call)
    for m in (1, 4, 1, 4, 0):
        assert prepared(call.x[:m]).shape == (m, 192)
    out = prepared(call.x.view(2, 2, 256))
    assert out.shape == (2, 2, 192) and out.is_contiguous()
    assert set(prepared.buffers) == {(0, 256), (1, 256), (4, 256), (2, 2, 256)}
    assert len(launches) == 10


def test_a_misaligned_input_is_copied(launches: list[Launch]) -> None:
    """One row of a slice is contiguous wherever it begins."""
    call = case(*FORMATS[0], 1)
    prepared = KERNELS[FORMATS[0]][0].prepare
    assert prepared is not None
    row = torch.randn(1, 300).bfloat16()
    linear = prepared(call)
    for first in (0, 8, 9):
        x = row[:, first : first + 256]
        assert x.is_contiguous() and linear(x).shape == (1, 192)
        address = ROW.unpack(launches[-2][4])[0]
        assert address % 16 == 0 and (address == x.data_ptr()) == (first < 9)


def test_few_wide_rows_are_shared_by_the_blocks_of_a_cluster(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.kernels.activation.quantize_activation.WIDE", 128)
    call = case(*FORMATS[0], 200)
    prepared = KERNELS[FORMATS[0]][0].prepare
    assert prepared is not None
    linear = prepared(call)
    for m in (1, 32, 33, 128, 129, 200):
        linear(call.x[:m])
    kernels, blocks = zip(*(launch[:2] for launch in launches[::2]), strict=True)
    assert blocks == (8, 8 * 32, 2 * 33, 2 * 128, 129, 200)
    assert [kernels.index(kernel) for kernel in kernels] == [0, 0, 2, 2, 4, 4]


def test_inputs_of_another_width_or_device_are_refused(launches: list[Launch]) -> None:
    call = case(*FORMATS[0], 4)
    assert KERNELS[FORMATS[0]][0].prepare is not None
    prepared = KERNELS[FORMATS[0]][0].prepare(call)
    with pytest.raises(QtoolError, match=r"x is \(4, 128\); expected 256 input channels"):
        prepared(call.x[:, :128].contiguous())
    prepared.index = 1
    with pytest.raises(QtoolError, match="both must be on one"):
        prepared(call.x)
    assert not launches


def test_a_launch_is_what_the_driver_documents() -> None:
    """CUlaunchConfig and CUlaunchAttribute, as cuda.bindings lays them out."""
    driver = pytest.importorskip("cuda.bindings.driver")
    expected = driver.CUlaunchConfig()
    expected.gridDimX, expected.gridDimY, expected.gridDimZ = 3, 1, 1
    expected.blockDimX, expected.blockDimY, expected.blockDimZ = 384, 1, 1
    expected.sharedMemBytes, expected.hStream = 4096, 77
    attribute = driver.CUlaunchAttribute()
    ids = driver.CUlaunchAttributeID
    attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    expected.attrs, expected.numAttrs = [attribute], 1
    config = launching._config(3, 384, 4096, 77, True)._obj
    size, pointer = ctypes.sizeof(config), slice(40, 48)
    found, wanted = (
        bytearray(b) for b in (bytes(config), ctypes.string_at(expected.getPtr(), size))
    )
    found[pointer] = wanted[pointer] = b""
    assert found == wanted
    flag = ctypes.string_at(config.attributes, 72)
    assert flag == ctypes.string_at(attribute.getPtr(), 72)
    assert launching._config(3, 384, 4096, 77, False)._obj.attribute_count == 0
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    named = [f"CU_TENSOR_MAP_DATA_TYPE_UINT{8 * item}" for item in launching._ITEMS]
    assert [int(getattr(types, name)) for name in named] == list(launching._ITEMS.values())
    named = ["NONE", "64B", "128B"]
    numbers = [int(getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{name}")) for name in named]
    assert numbers == list(launching._SWIZZLES.values())


def test_a_thread_without_a_context_gets_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread has none while the GPU is the current one, which torch then need not set."""
    made: list[int] = []

    class Driver:
        CUfunction = CUdevice = int

        def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: int) -> tuple[int, int]:
            return (0, 3) if made else (launching._NO_CONTEXT, 0)

        def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
            return 0, device

        def cuCtxSetCurrent(self, context: int) -> tuple[int]:
            made.append(context)
            return (0,)

    monkeypatch.setattr(launching, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for _ in range(2):
        assert launching.resident_blocks(77, 128, 4096, torch.device("cuda:1")) == 3
    assert made == [1]


def test_plans_keep_no_tensor(launches: list[Launch]) -> None:
    """A model that is unloaded frees its weights."""
    x = torch.ones(32, 256).bfloat16()
    norm, codes, one, weight = x[0].clone(), x.to(torch.int8), torch.ones(32), torch.ones(64)
    total, dtype, channel = torch.zeros(32).int(), torch.bfloat16, torch.zeros(1, 4, 2048)
    packed = channel.to(torch.uint8), weight.clone()
    marlin = torch.zeros(16, 256).int(), torch.ones(2, 128).bfloat16()
    sparse = torch.zeros(8, 256).int(), torch.zeros(8, 256, dtype=torch.int16), marlin[1].clone()
    slots, kv = torch.arange(32), x.view(32, 4, 64)
    pages = torch.zeros(1, 4, head_bytes(8, 64), dtype=torch.uint8)
    cached = kv, kv.clone(), pages, slots, torch.ones(4, 64), torch.ones(4, 64)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (quantize_activation, (x, None, norm, "rms-norm", 1e-5)),
        (quantize_residual_norm, (x, x, None, norm.clone(), 1e-5)),
        (w4a8_gemm, (codes, one, *packed, None, None, weight.to(torch.uint8), total, None,
                     "w4a8-qoq", None, dtype)),
        (w8a8_gemm, (codes, one, torch.zeros(64, 256, dtype=torch.int8), weight, None, dtype)),
        (w4a16_gemm, (x, *marlin, None, dtype)),
        (w4a16_24_gemm, (x, *sparse, None, dtype)),
        (kv_append_paged, (*cached, None, None)),
    ]  # fmt: skip
    kept = []
    for op, arguments in cases:
        call = OPERATORS[op](*arguments)
        call.require()
        kept.append(call.plan())  # type: ignore[attr-defined]
    tensors = [x for _, arguments in cases for x in arguments if isinstance(x, Tensor)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    del x, norm, codes, one, weight, total, channel, packed, marlin, sparse
    del slots, kv, pages, cached
    del cases, call, op, arguments, tensors
    gc.collect()
    assert len(kept) == 7 and not any(reference() is not None for reference in alive)


def test_group_formats_have_no_direct_launch() -> None:
    """Their ops are called; the table says so."""
    linear_format = LinearFormat("w4a4", 128, "apex4")
    assert KERNELS[linear_format.scheme, linear_format.layout][0].prepare is None


@pytest.mark.parametrize(("m", "width", "step"), [(17, 32, 128), (64, 64, 128), (1024, 256, 64)])
@pytest.mark.parametrize("group", [128, None])
def test_w4a16_is_launched_with_boxes_of_marlin_tiles(
    m: int, width: int, step: int, group: int | None, launches: list[Launch]
) -> None:
    n, k = 8192, 512
    x, bias = torch.randn(m, k).bfloat16(), torch.randn(n)
    qweight = torch.zeros(k // 16, 2 * n, dtype=torch.int32)
    scale = torch.ones(k // (group or k), n).bfloat16()
    launched(w4a16_gemm, x, qweight, scale, bias, torch.bfloat16)
    (launch,) = launches
    tokens, weights, *numbers, positions = GEMM.unpack(launch[4])
    # address, rows, columns, bytes of an item, rows and columns of a box, swizzle
    assert struct.unpack_from("<7q", tokens) == (x.data_ptr(), m, 2 * k, 1, width, 128, 128)
    box = (qweight.data_ptr(), k // 16, 2 * n, 4, step // 16, 128, 0)
    assert struct.unpack_from("<7q", weights) == box
    assert numbers[3] == scale.data_ptr() and numbers[5] == bias.data_ptr()
    assert numbers[6:8] == [0, 0] and numbers[9:14] == [m, n, k, 2, 0]
    assert numbers[-3:] == [0, n, n] and not any(positions)
    assert launch[1] <= 132 * choose_half(m, n, k).blocks_per_sm  # as many as the GPU holds


def test_2_4_sparse_w4a16_is_launched_with_boxes_of_codes_and_positions(
    launches: list[Launch],
) -> None:
    m, n, k = 64, 256, 512
    x, scale = torch.randn(m, k).bfloat16(), torch.ones(4, n).bfloat16()
    qweight = torch.zeros(k // 32, 2 * n, dtype=torch.int32)
    metadata = torch.zeros(k // 32, 2 * n, dtype=torch.int16)
    launched(w4a16_24_gemm, x, qweight, metadata, scale, None, torch.bfloat16)
    (launch,) = launches
    _, weights, *numbers, positions = GEMM.unpack(launch[4])
    box = (qweight.data_ptr(), k // 32, 2 * n, 4, 4, 128, 0)
    assert struct.unpack_from("<7q", weights) == box
    box = (metadata.data_ptr(), k // 32, 4 * n, 1, 4, 256, 0)
    assert struct.unpack_from("<7q", positions) == box
    assert numbers[9:14] == [m, n, k, 2, 0]


@pytest.mark.parametrize("parts", [1, 2])
def test_w4a16_experts_are_launched_with_all_their_tiles(
    parts: int, launches: list[Launch]
) -> None:
    experts, n, k, rows = 5, 256, 512, 40
    x, offsets = torch.randn(rows, k).bfloat16(), torch.zeros(experts + 1).int()
    qweight = torch.zeros(experts, parts, k // 16, 2 * n // parts, dtype=torch.int32)
    scale = torch.ones(experts, parts, 4, n // parts).bfloat16()
    launched(w4a16_experts_gemm, x, offsets, qweight, scale, torch.bfloat16)
    (launch,) = launches
    _, weights, *numbers, _ = GEMM.unpack(launch[4])
    box = (qweight.data_ptr(), experts * parts * k // 16, 2 * n // parts, 4, 8, 128, 0)
    assert struct.unpack_from("<7q", weights) == box
    assert numbers[3] == scale.data_ptr() and numbers[9:12] == [rows, experts * n, k]
    assert numbers[-4:] == [offsets.data_ptr(), experts, n, n // parts]


def test_w4a16_of_few_tokens_is_mma_sync(launches: list[Launch]) -> None:
    qweight, scale = torch.zeros(16, 256, dtype=torch.int32), torch.ones(2, 128).half()
    launched(w4a16_gemm, torch.zeros(16, 256).half(), qweight, scale, None, torch.float16)
    (launch,) = launches
    assert HALF.unpack(launch[4][-HALF.size :])[7:10] == (16, 128, 256)


@pytest.mark.parametrize(("layout", "group"), w4ax.CASES)
def test_w4ax_is_launched_with_boxes_of_its_layout(
    layout: str, group: int | None, launches: list[Launch]
) -> None:
    given, _ = w4ax.arguments(layout, group, bias=torch.randn(128))
    out = launched(w4ax_gemm, **given)
    (launch,) = launches
    tokens, weights, *numbers, _ = GEMM.unpack(launch[4])
    assert struct.unpack_from("<7q", tokens) == (given["x"].data_ptr(), 5, 1024, 1, 8, 128, 128)
    matrix, box = (
        ((32, 512, 4), (4, 256, 0)) if layout == "apex4" else ((128, 512, 1), (64, 64, 64))
    )
    assert struct.unpack_from("<7q", weights) == (given["qweight"].data_ptr(), *matrix, *box)
    assert numbers[:9] == addresses(
        *(None, None, None, given["scale"], None, given["bias"], given["sx"], None, out)
    )
    assert numbers[9:14] == [5, 128, 1024, 0, 0]
    launched(w4ax_gemm, **given | {"out_dtype": torch.int32})
    with groups_in_order():
        launched(w4ax_gemm, **given)
    kernels, blocks = zip(*(each[:2] for each in launches), strict=True)
    assert blocks == ((8, 8, 8) if group is None else (8, 8, 1))  # blocks share K but in order
    sums = w4ax_operand(layout, None, given["scale"].dtype)
    source = definition(sums, choose_s4(5, 128, 1024, None), torch.int32)
    assert kernels[1] == hash((repr((*source, "sm_90a")), "qtool_gemm"))


@pytest.mark.parametrize("case", [*mma.W4A8, *mma.W4AX], ids=str)
def test_mma_gemms_are_launched_with_their_tensors(
    case: tuple[Any, ...], launches: list[Launch]
) -> None:
    op: Any = w4a8_mma_gemm if case in mma.W4A8 else w4ax_mma_gemm
    given, _ = mma.w4a8_arguments(*case) if case in mma.W4A8 else mma.w4ax_arguments(*case)
    weight = (None, None, given.get("scale", given.get("s1")), given.get("zero"))
    if given.get("s2") is not None:
        offset = given["zero"] if given["offset"] is None else given["offset"]
        weight = (given["s2"], offset, given["s1"], None)
    out = launched(op, **given)
    tokens = given["sx"], given.get("token_sum"), given.get("eight_bit"), out
    (launch,) = launches
    found = MMA.unpack(launch[4])
    read = given["x"], given["qweight"], *weight, given["bias"], *tokens
    assert list(found[:11]) == addresses(*read)
    assert found[13:16] == (5, 96, 256) and launch[1:3] == (1, 128)
    with groups_in_order():
        launched(op, **given)
    alone = MMA.unpack(launches[1][4])[11] == 0  # no sums are passed on to another block
    assert found[11] and alone == (op is w4ax_mma_gemm and case[2] is not None)


def addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def test_a_misaligned_query_is_copied(launches: list[Launch]) -> None:
    """Its strides are all that is checked."""
    kv_attention._kernels.cache_clear()
    wide, lengths = torch.randn(2, 1024).bfloat16(), torch.ones(2, dtype=torch.int32)
    table, pages = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 4, head_bytes(4, 64))
    for first in (0, 8, 1):
        query = wide[:, first : first + 512].unflatten(1, (8, 64))
        given = (query, pages.byte(), table, lengths, None, None, None, torch.zeros_like(query))
        launched(kv_attention_paged, *given, 64, 1.0, 0.0, 0)
        parameters = kv_attention.PARAMETERS.unpack(launches[0][4])
        address, stride = parameters[0], parameters[13]
        assert address % 16 == 0 and (address == query.data_ptr()) == (first != 1)
        assert stride == (512 if first == 1 else 1024)
        launches.clear()
    kv_attention._kernels.cache_clear()
