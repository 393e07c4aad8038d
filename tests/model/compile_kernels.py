"""Compile every Triton kernel for a GPU that is not there: `compile_kernels CAPABILITY ...`.

All that launches a kernel runs on tensors of the host, and each launch ends with the machine code.
A line of JSON a launch: the kernel's name, the architecture, its shared memory and bytes of code,
the number of tokens, and what distinguishes this code from all other.
"""

import itertools
import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from albert_ds.model import fp8, fused_block, kernels
from albert_ds.model.draws import Draws

WIDTHS = [(torch.float32, 128), (torch.float16, 768)]
WIDTHS += [(torch.bfloat16, width) for width in (768, 1024, 2048, 4096)]
LAUNCH = JITFunction.run


class Device:
    """What Triton asks of a driver until it launches."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def launch_all(dtype: torch.dtype, width: int, tokens: int) -> None:
    def compile_and_tell(kernel: JITFunction, *args, **options) -> None:
        built = LAUNCH(kernel, *args, **{**options, "warmup": True})
        target = re.search(r"^\.target (\w+)", built.asm["ptx"], re.M)[1]
        code = len(built.asm["cubin"])
        shared = built.metadata.shared
        told = {"kernel": built.name, "target": target, "shared": shared, "code": code}
        print(json.dumps({**told, "tokens": tokens, "hash": built.hash}))

    JITFunction.run = compile_and_tell

    def make(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype, requires_grad=True)

    seeds = torch.zeros(2 * tokens, dtype=torch.int64)[tokens:]  # a part of a micro-batch
    draws = Draws(seeds, torch.tensor([0, tokens]))
    for dropout in (0.0, 0.1):
        sums = kernels.ResidualNorm.apply(
            *(make(tokens, width), make(tokens, width), make(width), make(width)),
            *(1e-12, dropout, draws if dropout else None),
        )
        sums.sum().backward()
    kernels.Drop.apply(make(tokens, width), 0.1, draws.seeds, draws.number()).sum().backward()
    kernels.Linear.apply(make(tokens, width), make(width, width), make(width)).sum().backward()
    for dropout in (0.0, 0.1):
        sums = [fused_block.SharedGradients(make(1)) for _ in range(3)]
        for _ in range(2):  # the second layer of a block adds to the sums of the first
            run_block(make, width, tokens, dropout, draws if dropout else None, sums)
    labels = torch.zeros(2 * tokens, dtype=torch.int64)[tokens:]  # a part of a micro-batch
    for z_loss in (False, True):
        logits = make(tokens, 30_000)
        loss, _, *squares = kernels.CrossEntropy.apply(logits, labels, -100, z_loss)
        sum(squares, loss).backward()


def cast_all(dtype: torch.dtype, width: int, tokens: int) -> None:
    x = torch.ones(tokens, width, dtype=dtype)
    for kind in fp8.TOP:
        fp8.quantise(x, kind)
        fp8.quantise(x, kind, columns=False)


def run_block(
    make,
    width: int,
    tokens: int,
    dropout: float,
    draws: Draws | None,
    sums: list[fused_block.SharedGradients],
) -> None:
    heads = make(tokens, width), make(3 * width, width), make(3 * width)
    *qkv, x = fused_block.LinearHeads.apply(*heads, sums[0])
    inner, x = fused_block.LinearGelu.apply(x, make(4 * width, width), make(4 * width), sums[1])
    tensors = make(width, 4 * width), make(width), make(width), make(width)
    options = 1e-12, dropout, draws, sums[2]
    out = fused_block.LinearNorm.apply(x, inner, *tensors, *options)
    sum(each.sum() for each in (*qkv, out)).backward()


if __name__ == "__main__":
    for capability in sys.argv[1:]:
        triton.runtime.driver.set_active(Device(int(capability)))
        for kind, tokens in itertools.product(WIDTHS, (64, 63)):
            launch_all(*kind, tokens)
            if int(capability) >= 90:
                cast_all(*kind, tokens)
