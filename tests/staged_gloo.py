"""NCCL that is gloo over copies on the host, so that several ranks can share one GPU.

NCCL refuses two ranks on a device. After `stage()` whoever asks for "nccl" gets it: a collective of
device tensors copies them to the host, runs there to its end, and copies the results back. A tensor
of the host is refused, as NCCL refuses it. Groups that ask for gloo are gloo.
"""

import functools
import inspect
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "send", "recv"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "gather", "scatter"),
    *("_all_gather_base", "_reduce_scatter_base"),
)
HOST_GROUPS = []  # groups that were asked for with gloo
real_new_group = c10d.new_group
real_init = c10d.init_process_group
real_barrier = c10d.barrier
copying = False  # whether a collective copies its tensors now


class Done:
    """The handle of a collective that has ended."""

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def is_of_host(group) -> bool:
    return any(group is known for known in HOST_GROUPS)


def new_group(ranks=None, timeout=None, backend=None, pg_options=None, device_id=None, **options):
    group = real_new_group(ranks, timeout=timeout, backend="gloo", **options)
    if backend == "gloo":
        HOST_GROUPS.append(group)
    return group


def init_process_group(backend=None, *given, device_id=None, **options):
    assert backend == "nccl", backend
    return real_init("gloo", *given, **options)


def over_host(name: str):
    """The collective `name` over copies of its tensors."""
    collective = getattr(c10d, name)
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*given, **options):
        global copying
        bound = signature.bind(*given, **options)
        if is_of_host(bound.arguments.get("group")):
            return collective(*given, **options)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(value):
            if isinstance(value, (list, tuple)):
                return type(value)(to_host(item) for item in value)
            if not isinstance(value, torch.Tensor):
                return value
            assert value.is_cuda, f"{name} of a host tensor over NCCL"
            copies.append((value.detach(), value.detach().cpu()))
            return copies[-1][1]

        copying = True
        try:
            arguments = {}
            for key, value in bound.arguments.items():
                known = len(copies)
                arguments[key] = to_host(value)
                if key.startswith("input"):
                    del copies[known:]  # only read; the result may be a part of it
            is_async = arguments.pop("async_op", False)
            result = collective(**arguments)
            for on_device, on_host in copies:
                on_device.copy_(on_host)
        finally:
            copying = False
        return Done() if is_async else result

    return call


@contextmanager
def coalesce(group=None, device=None, async_ops=False):
    class Work(Done):
        def append(self, work): ...

    yield Work()


def stage() -> None:
    """Call it before DeepSpeed and megatron-core take references to the collectives."""
    if c10d.new_group is new_group:
        return
    for name in COLLECTIVES:
        call = over_host(name)
        setattr(c10d, name, call)
        if hasattr(dist, name):
            setattr(dist, name, call)
    for module in (c10d, dist):
        module.new_group, module.init_process_group = new_group, init_process_group
        module.get_backend = lambda group=None: "gloo" if is_of_host(group) else "nccl"
        module.barrier = lambda group=None, async_op=False, device_ids=None: real_barrier(
            group=group, async_op=async_op
        )
    c10d._coalescing_manager = coalesce
    c10d._get_object_coll_device = lambda group=None: torch.device(
        "cpu" if is_of_host(group) else "cuda"
    )
