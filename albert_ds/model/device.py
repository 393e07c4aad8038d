"""Whether the kernels of Triton run where a tensor is."""

import functools
from importlib.util import find_spec

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    # A simulated device has a torch that was built without CUDA.
    return torch.backends.cuda.is_built() and find_spec("triton") is not None


def can_use_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and has_triton()
