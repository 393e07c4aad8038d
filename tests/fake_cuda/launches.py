"""What a middle layer of the encoder launches on CUDA, and the bytes that its operators touch.

    python -m tests.fake_cuda -m tests.fake_cuda.launches

Prints JSON: for each set of `--fast`, launches and bytes of the forward and of the backward pass.
Sizes are albert-large's over 16, and 1,024 tokens: 256 times the bytes are those of albert-large
with 16,384 tokens a pass. Every operator of the device counts as one launch, however many kernels
it starts; `norm` is not seen, because a compiled kernel is no operator.
"""

import json
import os
from collections import Counter
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from albert_ds.model.config import SIZES
from albert_ds.model.encoder import Encoder

LARGE = SIZES["albert-large"]
SMALL = replace(LARGE, hidden_size=64, num_heads=8, ffn_size=256)
TOKENS, LENGTH = 1024, 512
FORMS = ((), ("qkv",), ("gradients",), ("qkv", "gradients"))
NOT_LAUNCHED = {"empty", "empty_like", "detach", "_unsafe_view"}


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in NOT_LAUNCHED:
            self.calls[name] += 1
            # What an operator adds to is an argument and the result: it is read and written.
            tensors = [x for x in tree_leaves((args, result)) if torch.is_tensor(x)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


def count(num_layers: int, fast) -> list[Launches]:
    config = replace(SMALL, num_layers=num_layers)
    encoder = Encoder(config).to("cuda", torch.bfloat16)
    encoder.make_fast(fast)
    x = torch.randn(TOKENS, config.hidden_size, dtype=torch.bfloat16).cuda().requires_grad_()
    ends = torch.arange(0, TOKENS + 1, LENGTH, dtype=torch.int32).cuda()
    with Launches() as forward:
        y = encoder(x, ends, LENGTH)[-1]
    with Launches() as backward:
        y.backward(torch.zeros_like(y))
    return [forward, backward]


def main() -> None:
    found = {}
    for fast in FORMS:
        passes = zip(("forward", "backward"), count(4, fast), count(3, fast), strict=True)
        found["+".join(fast) or "plain"] = {
            name: {
                "launches": (more.calls - less.calls).total(),
                "bytes": more.bytes - less.bytes,
                "calls": more.calls - less.calls,
            }
            for name, more, less in passes
        }
    print(json.dumps(found), flush=True)
    # The backward pass of a device has threads of C++; the end of Python has met them still alive,
    # which aborts the process after its work.
    os._exit(0)


if __name__ == "__main__":
    main()
