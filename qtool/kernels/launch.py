"""Loading and launching compiled kernels through the CUDA driver, on torch's current stream.

One struct of parameters per kernel, passed by value: the tensor maps must lie in parameter space.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or QtoolError with the driver's own words."""
    driver = _driver()
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(error)
        raise QtoolError(f"CUDA driver: {text.decode() if text else error}")
    return values[0] if len(values) == 1 else tuple(values)


def load(code: bytes, entry: str, shared_bytes: int, device: int) -> Any:
    """The kernel ``entry`` of a cubin, with ``shared_bytes`` of dynamic shared memory; for the
    caller to keep.
    """
    driver = _driver()
    library = check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, entry.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, driver.CUdevice(device)))
    return driver.CUfunction(int(kernel))


def resident_blocks(kernel: Any, threads: int, shared_bytes: int) -> int:
    """How many blocks of a kernel a multiprocessor of the current device holds at once."""
    return int(
        check(_driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, threads, shared_bytes))
    )


@lru_cache(maxsize=4096)
def _tensor_map(
    address: int, rows: int, columns: int, item: int, box_rows: int, box_columns: int, swizzle: int
) -> bytes:
    driver = _driver()
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            {
                1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
                2: types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
                4: types.CU_TENSOR_MAP_DATA_TYPE_UINT32,
                8: types.CU_TENSOR_MAP_DATA_TYPE_UINT64,
            }[item],
            2,
            address,
            [u64(columns), u64(rows)],
            [u64(columns * item)],
            [u32(box_columns), u32(box_rows)],
            [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            {
                0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
                64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
                128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
            }[swizzle],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), 128)


def tensor_map(tensor: Tensor, box_rows: int, box_bytes: int = 128) -> bytes:
    """Descriptor of a row-major matrix of bytes for copies of ``box_rows`` x ``box_bytes``; zeros
    beyond it.

    Rows of 64 or 128 bytes are swizzled over their length, longer ones lie as they are.
    """
    rows, columns = tensor.shape
    item = 4 if box_bytes > 256 else 1  # a box has at most 256 items a row
    swizzle = box_bytes if box_bytes in (64, 128) else 0
    return _tensor_map(
        tensor.data_ptr(), rows, columns // item, item, box_rows, box_bytes // item, swizzle
    )


def item_map(
    tensor: Tensor, columns: int, box_rows: int, box_columns: int, *, swizzle: int = 0
) -> bytes:
    """The same for a matrix of ``columns`` items a row, whatever their size: ``swizzle`` bytes, 0
    for none.

    Args:
        tensor: ``[rows, ...]``, contiguous; its bytes are cut into ``columns`` items of 1, 2, 4 or
            8.
    """
    item = tensor.nbytes // (tensor.shape[0] * columns)
    return _tensor_map(
        tensor.data_ptr(), tensor.shape[0], columns, item, box_rows, box_columns, swizzle
    )


def launch(
    kernel: Any,
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
        overlap: let the grid be scheduled while the previous kernel of the stream drains
            (programmatic dependent launch). The kernel itself waits before it touches memory.
    """
    driver = _driver()
    buffer = ctypes.create_string_buffer(parameters, len(parameters))
    pointer = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    check(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointer), 0))
