"""Start the process group: ranks connect to a shared key-value store."""

import json
import logging
import os
import socket
import threading
import time
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist

from albert_ds.base.errors import ENDINGS, MachineFailed, UserError
from albert_ds.process.ending import Ending
from albert_ds.process.world import World, find_gpu_grant, wants_cpu

# While a rank that fails early waits for ranks that still import their libraries, to tell them.
NOTIFY_TIMEOUT = timedelta(seconds=60)
SLACK = 1.0  # seconds that torch is given to keep its own timeout
BACKLOG = 2048  # ranks that may connect at once
SECRET = "ALBERT_DS_SECRET"  # set by slurm/common.sh


class Unreachable(MachineFailed):
    """There is no store, so nobody can be told either."""


def host_store(world: World, *, minutes: float):
    """The store that all ranks share, with rank 0 as its host; None for one rank.

    Raises Unreachable if it cannot be reached within `minutes`.
    """
    if world.size == 1:
        return None
    patience = timedelta(minutes=minutes)
    try:
        return open_store(world, patience, is_host=world.rank == 0)
    except dist.DistError as error:
        what = str(error).splitlines()[0][:160]
    if world.rank == 0:  # another process may be rank 0 too, and host it
        with suppress(dist.DistError):
            return open_store(world, min(patience, NOTIFY_TIMEOUT))
    raise Unreachable(
        f"rank {world.rank} of {world.size} could not connect to {world.address} within "
        f"{minutes:g} min (--timeout-minutes): {what}"
    )


def open_store(world: World, patience: timedelta, *, is_host: bool = False):
    """Connect to the store that all ranks share. Every request times out after `patience`."""
    host, _, port = world.address.rpartition(":")
    hosts = is_host and not world.has_store
    opened = futures.Future()

    def connect() -> None:
        try:
            store = dist.TCPStore(
                host,
                int(port),
                is_master=hosts,
                timeout=patience,
                wait_for_workers=False,
                master_listen_fd=listen_at(host, int(port)) if hosts else None,
            )
            opened.set_result(store)
        except Exception as error:
            opened.set_exception(error)

    # torch heeds no timeout where another program holds the port and stays silent.
    threading.Thread(target=connect, daemon=True).start()
    try:
        store = opened.result(patience.total_seconds() + SLACK)
    except futures.TimeoutError:
        raise dist.DistNetworkError(f"the program at port {port} does not answer") from None
    # A launcher's store outlives its ranks, so each attempt has its own keys. Nobody else can name
    # them if the launcher has given the ranks a secret.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"albert-ds{os.environ.get(SECRET, '')}/{attempt}", store)


def listen_at(host: str, port: int) -> int | None:
    """A socket at the address by which ranks find this machine, where torch would take all.

    None if this machine has no such address (behind a router), if the port is taken, or if its name
    is a loopback address to itself alone, as 127.0.1.1 is on Debian.
    """
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if ip_address(address[0]).is_loopback and host not in ("localhost", address[0]):
                return None
            listener = socket.socket(family, kind)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
                listener.listen(BACKLOG)
                return listener.detach()
            except OSError:
                listener.close()
    return None


def join_world(world: World, *, tensor_parallel: int = 1, timeout_minutes: float = 10):
    """Connect to the other ranks and open torch.distributed; this rank's device. Collective."""
    order_kernels(tensor_parallel)
    store = host_store(world, minutes=timeout_minutes)
    try:
        device = connect_ranks(world, store, "", timeout_minutes=timeout_minutes)
    except ENDINGS as error:
        notify_ranks(world, store, Ending(error.code, str(error)))
        raise
    open_groups(world, store, device, timeout_minutes=timeout_minutes)
    return device


def connect_ranks(world: World, store, settings: str, *, timeout_minutes: float):
    """Choose this rank's device and wait for all ranks; returns the device. Collective.

    settings: a hash that all ranks must have. Raises MachineFailed naming the ranks that have
    not connected within `timeout_minutes`; UserError if `settings` differ, if a rank without CUDA
    was granted GPUs or is among ranks with CUDA, if two ranks have one GPU, or if a machine lacks
    the network to use; and the error of a rank that has failed meanwhile.
    """
    has_cuda = torch.cuda.is_available() and not wants_cpu()
    # Before the choice, which sets DS_ACCELERATOR.
    grant = None if has_cuda or wants_cpu() else find_gpu_grant()
    # DeepSpeed takes the number of its device from LOCAL_RANK.
    device, os.environ["LOCAL_RANK"] = choose_device(world, has_cuda)
    kind = f"cpu despite {grant}" if grant else "cpu"
    if has_cuda:
        kind = f"cuda {torch.cuda.get_device_properties(device).uuid}"
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(world.rank), str(world.size)
    if not dist.is_initialized():
        wait_for_ranks(world, store, kind, settings, minutes=timeout_minutes)
    return device


def open_groups(world: World, store, device, *, timeout_minutes: float) -> None:
    """Start torch.distributed: NCCL if `device` is CUDA's, else gloo. Collective."""
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=world.rank,
            world_size=world.size,
            store=store or dist.HashStore(),
            timeout=timedelta(minutes=timeout_minutes),
        )
    assert dist.get_world_size() == world.size
    _quieten_deepspeed()


def check_network(environ=os.environ) -> None:
    """Raise UserError if gloo, which every world uses, was given an interface that is not here."""
    wanted = environ.get("GLOO_SOCKET_IFNAME")
    interfaces = [name for _, name in socket.if_nameindex()]
    if wanted and not set(wanted.split(",")) <= set(interfaces):
        raise UserError(
            f"GLOO_SOCKET_IFNAME={wanted} (INTERFACE in slurm/site.env): allowed on this machine: "
            f"{', '.join(interfaces)}"
        )


def check_kinds(kinds: list[str]) -> None:
    """Raise UserError if a rank lacks the GPU that it was granted or that others have, and if two
    ranks have the same one.

    kinds: of each rank "cuda UUID", "cpu", or "cpu despite NAME=VALUE" (a grant of GPUs).
    """
    cpu = [rank for rank, kind in enumerate(kinds) if not kind.startswith("cuda ")]
    lost = [rank for rank in cpu if kinds[rank] != "cpu"]
    allowed = "allowed: GPUs that torch can use, or DS_ACCELERATOR=cpu to train on the CPU"
    if lost:
        grant = kinds[lost[0]].removeprefix("cpu despite ")
        raise UserError(
            f"{list_ranks(lost)}: torch {torch.__version__} finds no working GPU, but the launcher "
            f"granted GPUs ({grant}); {allowed}"
        )
    if 0 < len(cpu) < len(kinds):
        raise UserError(
            f"{list_ranks(cpu)}: no working GPU, but the other ranks have one; {allowed}"
        )
    for kind in kinds:
        shared = [rank for rank, other in enumerate(kinds) if other == kind and not cpu]
        if len(shared) > 1:
            raise UserError(
                f"{list_ranks(shared)} have the same GPU ({kind.removeprefix('cuda ')}); allowed: "
                "one rank a GPU, with fewer ranks a node or more GPUs visible to them"
            )


def choose_device(world: World, has_cuda: bool):
    """This rank's device, and its number for DeepSpeed."""
    if has_cuda:
        # Batches of text differ in size. torch's allocator keeps blocks of every size, and so may
        # reserve twice the memory, unless blocks can grow. It reads this when CUDA starts.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        # With one GPU visible to each task the local rank counts tasks, not devices.
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device, str(device.index)
    os.environ["DS_ACCELERATOR"] = "cpu"
    if world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # torch would give every rank all cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // world.local_size))
    return torch.device("cpu"), str(world.local_rank)


def order_kernels(tensor_parallel: int) -> None:
    """Let an all-reduce start before the product that it overlaps; call it before CUDA starts.

    With one hardware queue kernels run in the order in which they were issued.
    """
    if tensor_parallel > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def use_deterministic_algorithms() -> None:
    """Make every result the same in every run; call it before CUDA starts."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Filling uninitialised memory only finds defects.
    torch.utils.deterministic.fill_uninitialized_memory = False  # ty: ignore


def _quieten_deepspeed() -> None:
    """Give DeepSpeed the existing process group, without log lines and unused extensions."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # An all-reduce for inference on a CPU: it needs a compiler and 32 s to build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def wait_for_ranks(world: World, store, kind: str, settings: str, *, minutes: float) -> None:
    """Wait until every rank has come to the `store`, or one has failed. Collective.

    Raises MachineFailed naming the ranks that did not connect within `minutes`, the error of the
    rank that failed first, UserError if `settings` are not rank 0's, what `check_network` raises,
    and what `check_kinds` raises for the `kind` of every rank.
    """
    if world.size == 1:
        check_kinds([kind])
        return
    check_network()
    hosts = [f"host/{rank}" for rank in range(world.size)]
    try:
        if store.add(f"processes/{world.rank}", 1) > 1:
            raise UserError(
                f"another process is rank {world.rank} too at {world.address}; allowed: one "
                "process each, and a port for each run (deepspeed, torchrun: --master_port)"
            )
        store.set(f"life/{world.rank}", "[0, null, false]")  # the first beat of heartbeat.py
        store.set(f"kind/{world.rank}", kind)
        store.set(f"host/{world.rank}", os.uname().nodename)
        if world.rank == 0:
            store.set("settings", json.dumps(settings))
        if json.loads(store.get("settings")) not in (settings, None):
            raise UserError(
                "its settings, number of ranks, data, weights to start from or program are not "
                "those of rank 0; they must be the same on all ranks"
            )
        if store.add("ready", 1) == world.size:
            store.compare_set("start", "", "null")
        store.wait(["start"], timedelta(minutes=minutes))
        if failure := json.loads(store.get("start")):
            code, reason = failure
            raise {error.code: error for error in ENDINGS}.get(code, RuntimeError)(reason)
        kinds = store.multi_get([f"kind/{rank}" for rank in range(world.size)])
    except dist.DistStoreError:
        missing = [rank for rank, host in enumerate(hosts) if not store.check([host])]
        raise MachineFailed(
            f"{list_ranks(missing)} of {world.size} did not connect to {world.address} within "
            f"{minutes:g} min (--timeout-minutes)"
        ) from None
    except dist.DistError:
        raise MachineFailed("rank 0 left before all ranks had connected") from None
    check_kinds([kind.decode() for kind in kinds])


def notify_ranks(world: World, store, ending: Ending) -> bool:
    """Tell the ranks that wait for this one, or will, how it ends; whether they did not know.

    store: that of `host_store`, if this rank has come so far. Returns once rank 0 knows; rank
    0, whose store may be the one, returns once all know. Both wait `NOTIFY_TIMEOUT` at most.
    """
    told = f"rank {world.rank} on {os.uname().nodename}: {ending.reason}"
    is_news = True
    with suppress(dist.DistError):
        store = store or open_store(world, NOTIFY_TIMEOUT, is_host=world.rank == 0)
        first = json.loads(store.compare_set("start", "", json.dumps([ending.code, told])))
        if world.rank == 0:
            store.set("settings", "null")  # who comes now waits for these first
            store.set("notified/0", ending.reason)
        store.wait(["notified/0"], NOTIFY_TIMEOUT)
        is_news = first is not None and (first[1] == told or ending.reason not in first[1])
        # Rank 0 says the same, though this rank was first.
        is_news = is_news and store.get("notified/0").decode() != ending.reason
        notified = store.add("notified", 1)
        until = time.monotonic() + NOTIFY_TIMEOUT.total_seconds()
        while world.rank == 0 and notified < world.size and time.monotonic() < until:
            time.sleep(0.05)
            notified = store.add("notified", 0)
    return is_news


def list_ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 3, 4, ... (12 in all)`."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
