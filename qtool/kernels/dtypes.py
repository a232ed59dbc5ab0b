"""The dtypes that kernels take, and their numbers in the CUDA sources."""

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALF)
#: numbers of dtypes in csrc/common/element.cuh and the GEMMs; int32 stands for bare sums
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3}
