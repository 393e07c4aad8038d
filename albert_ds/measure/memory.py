"""What a model needs at the most in a step, beside other models in the same process.

On CUDA the bytes of tensors; on a CPU the resident set of the process, which Linux can be told to
start measuring anew. What other models hold while this one is measured is taken off.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PeakMemory:
    """Made before a model is built, asked after its first steps.

    base: bytes that the process held before any model (None: this is the first); what is held
    beyond them now belongs to other models.
    """

    def __init__(self, device: torch.device, base: int | None = None):
        self._device = device
        held = held_bytes(device)
        self.base = held if base is None else base
        self._others = held - self.base

    def restart(self) -> None:
        """The peak counts from now on."""
        import torch

        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes at the most since `restart`, without what other models hold."""
        import torch

        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() - self._others
        return _status("VmHWM") - self._others


def held_bytes(device: torch.device) -> int:
    """Bytes held now; memory that was freed is first given back to the system."""
    import torch

    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))
