"""Peak memory of one model's step, while other models are in the same process.

On CUDA: the bytes of tensors. On a CPU: the resident set of the process, whose peak Linux resets on
request. Bytes that other models hold are subtracted.
"""

import ctypes
import gc
from pathlib import Path

import psutil
import torch


class PeakMemory:
    """Create it before a model is built, read it after the first steps.

    base: bytes that the process held before any model (None: no model exists yet). Bytes held now
    beyond `base` belong to other models.
    """

    def __init__(self, device: torch.device, base: int | None = None):
        self._device = device
        held = held_bytes(device)
        self.base = held if base is None else base
        self._others = held - self.base
        self._reserved = torch.cuda.memory_reserved() if device.type == "cuda" else 0

    def restart(self) -> None:
        """Reset the peak."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Peak bytes since `restart`, without those of other models."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() - self._others
        lines = Path("/proc/self/status").read_text().splitlines()  # psutil has no VmHWM
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return 1024 * peak - self._others

    def read_reserved(self) -> int:
        """The most that torch reserved on CUDA since `restart`, without what it had before."""
        return torch.cuda.max_memory_reserved() - self._reserved


def held_bytes(device: torch.device) -> int:
    """Bytes held now, after freed memory is returned to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss
