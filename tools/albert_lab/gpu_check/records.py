"""What a process of measurements found, written after each; one that fails stops nothing."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from albert_ds.base.files import write_report

SECONDS_TO_END = 10  # kept free for the measurement that runs when the time is over


class Records:
    """The measurements of this process, which has so many seconds from its start."""

    def __init__(self, path: Path, seconds: float):
        self.path = path
        self.all = []
        self._ends = psutil.Process().create_time() + seconds - SECONDS_TO_END

    def left(self) -> float:
        return self._ends - time.time()

    def measure(self, kind: str, work: Callable[[], dict], *, needs: float = 5, **facts) -> None:
        """Write down what `work` finds, its error, or that it is left out.

        needs: seconds without which it does not start. What does not fit into memory is no failure.
        """
        begun = time.time()
        outcome = {"ok": None, "error": "left out: no time"}
        if self.left() >= needs:
            try:
                outcome = {"ok": True, "found": work()}
            except torch.cuda.OutOfMemoryError:
                outcome = {"ok": None, "error": "does not fit into the memory"}
            except Exception as error:
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:4000]}"
                outcome = {"ok": False, "error": text, "where": traceback.format_exc()[-3000:]}
            gc.collect()
            torch.cuda.empty_cache()
        what = ", ".join([kind, *(f"{name} {value}" for name, value in facts.items())])
        named = {"kind": kind, "what": what, **facts}
        record = {**named, **outcome, "seconds": round(time.time() - begun, 1)}
        self.all.append(record)
        write_report(self.path, {"records": self.all})
        print(json.dumps(record)[:400], flush=True)
