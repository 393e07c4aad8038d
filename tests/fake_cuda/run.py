"""Run a trainer as if on CUDA: `python run.py REPORT albert_ds.train FLAG...`, once a rank.

NCCL is gloo that refuses tensors of the host. Rank 0 writes REPORT, JSON:
    mixed   operators that were given tensors of both devices, and where
    steps   for each optimizer step, what made the host wait, and how often: {"WHAT at WHERE": N}
"""

import functools
import importlib
import inspect
import json
import os
import sys
import traceback
from collections import Counter
from contextlib import contextmanager

from tests.fake_cuda import torch_cuda  # isort: skip (before torch)
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "send", "recv"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "gather", "scatter"),
    *("_all_gather_base", "_reduce_scatter_base"),
)
HOST_GROUPS = []  # groups that were asked for with gloo
ANY_GROUP = c10d.new_group, c10d.init_process_group, c10d.barrier


def is_of_host(group) -> bool:
    return any(group is known for known in HOST_GROUPS)


def new_group(ranks=None, timeout=None, backend=None, pg_options=None, device_id=None, **how):
    group = ANY_GROUP[0](ranks, timeout=timeout, backend="gloo", **how)
    if backend == "gloo":
        HOST_GROUPS.append(group)
    return group


def init_process_group(backend=None, *given, device_id=None, **how):
    assert backend == "nccl", backend
    return ANY_GROUP[1]("gloo", *given, **how)


def over_gloo(name: str):
    collective = getattr(c10d, name)
    signature = inspect.signature(collective)

    def move(value, group):
        if isinstance(value, (list, tuple)):
            return type(value)(move(item, group) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_cuda:
            return torch_cuda.device.on_host(value.detach())
        assert is_of_host(group), f"{name} of a host tensor over NCCL"
        return value

    @functools.wraps(collective)
    def call(*given, **how):
        bound = signature.bind(*given, **how)
        group = bound.arguments.get("group")
        for key, value in bound.arguments.items():
            bound.arguments[key] = move(value, group)
        return collective(*bound.args, **bound.kwargs)

    return call


@contextmanager
def coalesce(group=None, device=None, async_ops=False):
    class Work:
        def append(self, work): ...

        def wait(self): ...

    yield Work()


def fake_nccl() -> None:
    for name in COLLECTIVES:
        call = over_gloo(name)
        setattr(c10d, name, call)
        if hasattr(dist, name):
            setattr(dist, name, call)
    for module in (c10d, dist):
        module.new_group, module.init_process_group = new_group, init_process_group
        module.get_backend = lambda group=None: "gloo" if is_of_host(group) else "nccl"
        module.barrier = lambda group=None, async_op=False, device_ids=None: ANY_GROUP[2](
            group=group, async_op=async_op
        )
    c10d._coalescing_manager = coalesce
    c10d._get_object_coll_device = lambda group=None: torch.device(
        "cpu" if is_of_host(group) else "cuda:0"
    )


# The functions of a trainer that are one step.
STEP = {"albert_ds.train": ("run_passes", "update"), "albert_ds.finetune": ("train_step",)}


class Report:
    def __init__(self):
        self.mixed, self.steps, self.now = Counter(), [], None

    def hear(self, name: str, kind: str) -> None:
        if kind == "mixed":
            self.mixed[f"{name} at {find_place()}"] += 1
        elif self.now is not None:
            self.now[f"{name} at {find_place()}"] += 1

    def watch(self, trainer, *parts: str) -> None:
        """Count events from the begin of the first of these functions to the end of the last."""

        def watched(part, function):
            def call(*given):
                if part == parts[0]:
                    self.now = Counter()
                found = function(*given)
                if part == parts[-1]:
                    self.steps.append(self.now)
                    self.now = None
                return found

            return call

        for part in parts:
            setattr(trainer, part, watched(part, getattr(trainer, part)))


def find_place() -> str:
    """The innermost lines of the product or of a library that it calls."""
    packages = ("albert_ds/", "site-packages/deepspeed/", "site-packages/megatron/")
    for frame in reversed(traceback.extract_stack()):
        for package in packages:
            if package in frame.filename:
                return f"{package}{frame.filename.rpartition(package)[2]}:{frame.name}"
    return "?"


def main(path: str, program: str, *argv: str) -> None:
    fake_nccl()
    report = Report()
    torch_cuda.listen(report.hear)
    trainer = importlib.import_module(program)
    report.watch(trainer, *STEP[program])
    code = trainer.main(list(argv))
    torch_cuda.listen(None)
    if os.environ.get("RANK", "0") == "0":
        with open(path, "w") as file:
            json.dump({"mixed": report.mixed, "steps": report.steps}, file, indent=1)
    sys.stdout.flush()
    os._exit(code)  # torch's own ending would ask the driver


if __name__ == "__main__":
    main(*sys.argv[1:])
