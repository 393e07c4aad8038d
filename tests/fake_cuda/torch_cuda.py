"""Make torch believe in CUDA; `hook.py` loads this as soon as torch has been imported."""

import contextlib
import itertools
import os
import threading
import time
import weakref
from types import SimpleNamespace

import device  # ty: ignore (the compiled module)
import torch
import torch.cuda as cuda
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

COUNT = int(os.environ["FAKE_CUDA_DEVICES"])
device.set_count(COUNT)
tell = lambda name, kind: None  # noqa: E731 (replaced by whoever listens)


def listen(listener) -> None:
    """Call `listener(name, kind)` for every event; the kinds stand at the top of device.cpp."""
    global tell
    tell = listener
    device.listen(listener)


def number_of(which=None) -> int:
    if which is None or (not isinstance(which, int) and torch.device(which).index is None):
        return device.current_device()
    return which if isinstance(which, int) else torch.device(which).index


def set_device(which) -> None:
    number = number_of(which)
    if number >= COUNT:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({number} of {COUNT})")
    device.set_device(number)


def pin_memory(x, *_):
    """The trainer's own thread waits for the copy; the loader's thread makes it meanwhile."""
    if not device.is_pinned(x) and threading.current_thread() is threading.main_thread():
        tell("pin_memory", "wait")
    return device.pin(x)


class Stream:
    """A queue that is always empty; torch knows it by `stream_id`."""

    stream_id, device_type, cuda_stream = 0, 1, 0

    def __init__(self, device=None, **_):
        self.device = torch.device("cuda", number_of(device))
        self.device_index = self.device.index

    def synchronize(self):
        tell("stream.synchronize", "wait")

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, stream): ...

    def wait_event(self, event): ...

    def query(self):
        return True


class Event:
    def __init__(self, **_): ...

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        tell("event.synchronize", "wait")

    def wait(self, stream=None): ...

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


class DeviceContext:
    def __init__(self, which):
        self.number = number_of(which)

    def __enter__(self):
        self.before = device.current_device()
        set_device(self.number)

    def __exit__(self, *_):
        device.set_device(self.before)


class Graph(TorchDispatchMode):
    """A tape: what ran within is run again, and what it gives is written into the same memory.

    As on a real device a capture draws no random numbers, and refuses to wait for the device or to
    copy from ordinary memory of the host.
    """

    def __init__(self, *_, **__):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        waits = function in (aten._local_scalar_dense.default, aten.nonzero.default)
        copies = function in (aten._to_copy.default, aten.copy_.default)
        if waits or (copies and not all(x.is_cuda for x in given)):
            raise RuntimeError(f"CUDA error: {function} is not permitted when a stream captures")
        outputs = function(*args, **kwargs)
        fresh, made = find_made(given, outputs)
        self.calls.append((function, args, kwargs, fresh, made))
        return outputs

    @torch.no_grad()
    def replay(self):
        if self.pool is not None:
            self.pool.write_over()
        for function, args, kwargs, fresh, made in self.calls:
            again = tree_leaves(function(*args, **kwargs))
            again = [x for x in again if isinstance(x, torch.Tensor)]
            for old, new, is_new in zip(fresh, again, made, strict=True):
                if is_new:
                    old.detach().copy_(new)


def find_made(given: list, outputs) -> tuple[list, list[bool]]:
    """The tensors in `outputs`, and which of them have memory of their own."""
    held = {x.untyped_storage().data_ptr() for x in given}
    fresh = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    return fresh, [x.untyped_storage().data_ptr() not in held for x in fresh]


class Pool(TorchDispatchMode):
    """Memory of graphs: a graph that is replayed writes over what was made within and is kept."""

    def __init__(self):
        super().__init__()
        self.id = self
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        fresh, made = find_made(given, outputs)
        self.made += [weakref.ref(x) for x in itertools.compress(fresh, made)]
        return outputs

    def write_over(self):
        for reference in self.made:
            if (kept := reference()) is not None:
                kept.detach().zero_()


@contextlib.contextmanager
def capture(graph, pool=None, stream=None, capture_error_mode="global"):
    graph.pool = pool
    before = torch.get_rng_state()
    try:
        with graph:
            yield
    finally:
        torch.set_rng_state(before)


STREAM = Stream()
MEMORY = 141 * 2**30
PROPERTIES = SimpleNamespace(
    name="fake H200",
    total_memory=MEMORY,
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    uuid=f"fake-{os.getpid()}",  # each rank has its own
)
NOTHING = {
    "set_sync_debug_mode",
    "empty_cache",
    "manual_seed",
    "manual_seed_all",
    "set_stream",
    "_lazy_init",
    "init",
}
ANSWERS = {
    "is_available": True,
    "is_initialized": True,
    "device_count": COUNT,
    "current_stream": STREAM,
    "default_stream": STREAM,
    "get_device_name": PROPERTIES.name,
    "get_device_properties": PROPERTIES,
    "get_device_capability": (9, 0),
    "get_arch_list": ["sm_90"],
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "_is_in_bad_fork": False,
    "initial_seed": 0,
    "mem_get_info": (MEMORY, MEMORY),
    "memory_stats": {},
    **dict.fromkeys(NOTHING),
}
for name, answer in ANSWERS.items():
    setattr(cuda, name, lambda *_, answer=answer, **__: answer)
cuda.memory_allocated = cuda.memory_reserved = lambda *_: device.live_bytes()
cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: device.peak_bytes()
cuda.reset_peak_memory_stats = cuda.reset_max_memory_allocated = lambda *_: device.reset_peak()
# Its kernels draw from the host's generator.
cuda.get_rng_state = lambda *_: torch.get_rng_state()
cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
cuda._lazy_call = lambda *_, **__: None
cuda.current_device = device.current_device
cuda.CUDAGraph, cuda.graph = Graph, capture
cuda.MemPool = Pool
cuda.use_mem_pool = lambda pool: pool
cuda.set_device, cuda.device, cuda.Stream, cuda.Event = set_device, DeviceContext, Stream, Event
cuda.stream = lambda stream: contextlib.nullcontext()
cuda.synchronize = lambda *_: tell("cuda.synchronize", "wait")
cuda.nvtx = SimpleNamespace(range_push=lambda *_: None, range_pop=lambda: None)
cuda.nccl = SimpleNamespace(version=lambda: (2, 28, 3), is_available=lambda *_: True)
torch.version.cuda = "13.0"
torch.Tensor.pin_memory = pin_memory
torch.Tensor.record_stream = lambda self, stream: None
torch.Tensor.cuda = lambda self, which=None, non_blocking=False, **_: self.to(
    torch.device("cuda", number_of(which)), non_blocking=non_blocking
)


# ---- flash attention, dense; its contract is that of torch's CUDA operator

KEPT = {}  # what dropout kept, by the "seed" that the backward pass is given
SEEDS = itertools.count()  # not every forward pass has a backward pass


def check_contract(q, k, v, q_ends, kv_ends, q_most: int, kv_most: int) -> tuple[list, list]:
    assert all(x.is_cuda for x in (q, k, v, q_ends, kv_ends))
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert q_ends.dtype == kv_ends.dtype == torch.int32
    assert q_ends.is_contiguous() and kv_ends.is_contiguous()
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    bounds = []
    for x, ends, most in ((q, q_ends, q_most), (k, kv_ends, kv_most)):
        values = device.on_host(ends).tolist()
        lengths = [end - begin for begin, end in zip(values, values[1:], strict=False)]
        assert values[-1] == len(x) and 0 <= min(lengths) and max(lengths) <= most
        bounds.append([slice(*pair) for pair in zip(values, values[1:], strict=False)])
    assert len(bounds[0]) == len(bounds[1])
    return bounds[0], bounds[1]


def host_floats(*tensors):
    return [device.on_host(x.detach()).float() for x in tensors]


def on_device(x, like):
    return device.pin(x).to(like.device, non_blocking=True)


def attend(q, k, v, q_ends, kv_ends, q_most, kv_most, dropout, causal, returns_mask, **options):
    q_parts, kv_parts = check_contract(q, k, v, q_ends, kv_ends, q_most, kv_most)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    hq, hk, hv = host_floats(q, k, v)
    outputs, kept = [], []
    with torch.no_grad():
        for q_part, kv_part in zip(q_parts, kv_parts, strict=True):
            scores = torch.einsum("qhd,khd->hqk", hq[q_part], hk[kv_part]) * scale
            shares = scores.softmax(-1)
            kept.append((torch.rand_like(shares) >= dropout) / (1 - dropout))
            outputs.append(torch.einsum("hqk,khd->qhd", shares * kept[-1], hv[kv_part]))
    number = next(SEEDS)
    seed = torch.full((2,), number, dtype=torch.int64)
    KEPT[number] = kept
    tensors = (
        torch.cat(outputs).to(q.dtype),
        torch.zeros(q.shape[1], len(q)),
        seed,
        torch.zeros((), dtype=torch.int64),
        torch.zeros(0, dtype=q.dtype),
    )
    return tuple(on_device(x, q) for x in tensors)


def attend_backward(grad, q, k, v, out, lse, q_ends, kv_ends, q_most, kv_most, *rest, **options):
    dropout, causal, seed, unused = rest
    assert grad.is_cuda and grad.dtype == q.dtype
    q_parts, kv_parts = check_contract(q, k, v, q_ends, kv_ends, q_most, kv_most)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    hq, hk, hv, hg = host_floats(q, k, v, grad)
    kept = KEPT.pop(int(device.on_host(seed)[0]), None)
    assert kept is not None, "a backward pass without its forward pass"
    gradients = ([], [], [])
    for q_part, kv_part, keep in zip(q_parts, kv_parts, kept, strict=True):
        shares = (torch.einsum("qhd,khd->hqk", hq[q_part], hk[kv_part]) * scale).softmax(-1)
        d_shares = torch.einsum("qhd,khd->hqk", hg[q_part], hv[kv_part]) * keep
        d_scores = shares * (d_shares - (d_shares * shares).sum(-1, keepdim=True)) * scale
        gradients[0].append(torch.einsum("hqk,khd->qhd", d_scores, hk[kv_part]))
        gradients[1].append(torch.einsum("hqk,qhd->khd", d_scores, hq[q_part]))
        gradients[2].append(torch.einsum("hqk,qhd->khd", shares * keep, hg[q_part]))
    return tuple(on_device(torch.cat(x).to(q.dtype), q) for x in gradients)


LIBRARY = torch.library.Library("aten", "IMPL", "CUDA")
LIBRARY.impl("_flash_attention_forward", attend, "CUDA")
LIBRARY.impl("_flash_attention_backward", attend_backward, "CUDA")


# ---- a 16-bit product added to fp32, which torch has on CUDA only


def add_product(total, a, b, out_dtype, *, beta=1, alpha=1, out):
    assert total.is_cuda and a.is_cuda and b.is_cuda and out is total
    assert a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)
    assert out.dtype == out_dtype == torch.float32 and beta == alpha == 1
    host_total, host_a, host_b = map(device.on_host, (total, a, b))
    host_total.addmm_(host_a.float(), host_b.float())
    return out


LIBRARY.impl("addmm.dtype_out", add_product, "CUDA")
