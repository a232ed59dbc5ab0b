"""Loading and launching compiled kernels through the CUDA driver, on torch's current stream.

Each kernel takes one struct of parameters by value, since tensor maps must lie in parameter space.
Work done once per kernel goes through ``cuda.bindings``. Work done in each launch calls the C
functions of the driver directly, because the objects of ``cuda.bindings`` cost more than the call.
"""

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import ARCHITECTURES

#: CUtensorMapDataType by the bytes of an item, CUtensorMapSwizzle by the bytes it swizzles
_ITEMS = {1: 0, 2: 1, 4: 2, 8: 4}
_SWIZZLES = {0: 0, 64: 2, 128: 3}
_L2_PROMOTION_256B = 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_OVERLAP = 6
#: CUDA_ERROR_INVALID_CONTEXT
_NO_CONTEXT = 201
_Parameters = ctypes.c_char_p * 1
_U32, _U64 = ctypes.c_uint32 * 2, ctypes.c_uint64 * 2


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute whose value is a flag."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _cuda() -> Any:
    """The driver's C library."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cuLaunchKernelEx.argtypes = (pointer, pointer, pointer, pointer)
    library.cuTensorMapEncodeTiled.argtypes = (
        *(pointer, number, ctypes.c_uint32, pointer),
        *(pointer, pointer, pointer, pointer),
        *(number, number, number, number),
    )
    return library


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or QtoolError with the driver's own words."""
    error, *values = result
    if int(error):
        raise _failed(int(error))
    return values[0] if len(values) == 1 else tuple(values)


def _failed(status: int) -> QtoolError:
    driver = _driver()
    _, text = driver.cuGetErrorString(driver.CUresult(status))
    return QtoolError(f"CUDA driver: {text.decode() if text else status}")


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def require_ampere(op: str, device: torch.device) -> tuple[str, bool]:
    """NVRTC's name of a GPU's architecture, and whether its launches may overlap (from Hopper on).

    Raises:
        QtoolError: naming ``op``, for a GPU before Ampere.
    """
    major, minor = compute_capability(device)
    if major < 8:
        raise QtoolError(f"{op}: needs sm_80 or newer, {device} is sm_{major}{minor}")
    return f"sm_{major}{minor}", major >= 9


def require_listed(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU that is in :data:`~qtool.kernels.build.ARCHITECTURES`.

    Raises:
        QtoolError: for another GPU.
    """
    major, minor = capability = compute_capability(device)
    if capability not in ARCHITECTURES:
        names = ", ".join(dict.fromkeys(name for name, _ in ARCHITECTURES.values()))
        raise QtoolError(f"this kernel runs on {names}; {device} is sm_{major}{minor}")
    return capability


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def load(code: bytes, entry: str, shared_bytes: int, device: int) -> int:
    """The handle of kernel ``entry`` of a cubin, with ``shared_bytes`` of dynamic shared memory.

    The kernel is never unloaded, so the caller should keep the handle.
    """
    driver = _driver()
    library = check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, entry.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, driver.CUdevice(device)))
    return int(kernel)


def resident_blocks(kernel: int, threads: int, shared_bytes: int, device: torch.device) -> int:
    """How many blocks of a kernel a multiprocessor of ``device`` holds at once."""
    driver = _driver()
    function = driver.CUfunction(kernel)
    with torch.cuda.device(device):
        ask = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        occupancy = ask(function, threads, shared_bytes)
        if int(occupancy[0]) == _NO_CONTEXT:
            _make_current(device.index)
            occupancy = ask(function, threads, shared_bytes)
    return int(check(occupancy))


@lru_cache(maxsize=4096)
def _tensor_map(
    address: int, rows: int, columns: int, item: int, box_rows: int, box_columns: int, swizzle: int
) -> bytes:
    buffer = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(buffer) % _MAP_ALIGNMENT
    status = _cuda().cuTensorMapEncodeTiled(
        *(ctypes.addressof(buffer) + start, _ITEMS[item], 2, address),
        *(_U64(columns, rows), _U64(columns * item), _U32(box_columns, box_rows), _U32(1, 1)),
        *(0, _SWIZZLES[swizzle], _L2_PROMOTION_256B, 0),
    )
    if status:
        raise _failed(status)
    return buffer.raw[start : start + _MAP_BYTES]


def byte_map(address: int, rows: int, columns: int, box_rows: int, box_bytes: int = 128) -> bytes:
    """TMA descriptor of a row-major byte matrix for boxes of ``box_rows`` x ``box_bytes``.

    Reads beyond the matrix give zeros. Rows of a box of 64 or 128 bytes are swizzled over their
    length; those of another length are not swizzled.
    """
    item = 4 if box_bytes > 256 else 1  # a box has at most 256 items a row
    swizzle = box_bytes if box_bytes in (64, 128) else 0
    return _tensor_map(address, rows, columns // item, item, box_rows, box_bytes // item, swizzle)


def item_map(
    tensor: Tensor, columns: int, box_rows: int, box_columns: int, *, swizzle: int = 0
) -> bytes:
    """TMA descriptor of a matrix of ``columns`` items per row.

    Args:
        tensor: ``[rows, ...]``, contiguous; each row is cut into ``columns`` items of 1, 2, 4 or 8
            bytes.
        swizzle: in bytes, 0 for none.
    """
    item = tensor.nbytes // (tensor.shape[0] * columns)
    return _tensor_map(
        tensor.data_ptr(), tensor.shape[0], columns, item, box_rows, box_columns, swizzle
    )


def pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    """The addresses of ``tensors``, 0 for None."""
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


@lru_cache(maxsize=4096)
def _config(grid: int, block: int, shared_bytes: int, stream: int, overlap: bool) -> Any:
    flag = _Attribute(_OVERLAP, 0, (ctypes.c_int * 16)(1))
    config = _Config(
        (ctypes.c_uint * 3)(grid, 1, 1),
        (ctypes.c_uint * 3)(block, 1, 1),
        shared_bytes,
        stream,
        ctypes.pointer(flag) if overlap else None,
        int(overlap),
    )
    return ctypes.byref(config)


def launch(
    kernel: int,
    grid: int,
    block: int,
    shared_bytes: int,
    parameters: bytes,
    device: torch.device,
    *,
    overlap: bool,
) -> None:
    """Start a 1-D grid on torch's current stream.

    Args:
        parameters: the kernel's struct; the driver copies it before it returns.
        overlap: let the grid be scheduled while the previous kernel of the stream drains
            (programmatic dependent launch). The kernel itself waits before it touches memory.
    """
    index = device.index
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, block, shared_bytes, parameters, device, overlap=overlap)
        return
    stream = torch._C._cuda_getCurrentRawStream(index)
    config = _config(grid, block, shared_bytes, stream, overlap)
    status = _cuda().cuLaunchKernelEx(config, kernel, _Parameters(parameters), None)
    if status == _NO_CONTEXT:
        _make_current(index)
        status = _cuda().cuLaunchKernelEx(config, kernel, _Parameters(parameters), None)
    if status:
        raise _failed(status)


def _make_current(index: int) -> None:
    """Give a thread that has not used CUDA yet torch's context of device ``index``."""
    driver = _driver()
    context = check(driver.cuDevicePrimaryCtxRetain(driver.CUdevice(index)))
    check(driver.cuCtxSetCurrent(context))
