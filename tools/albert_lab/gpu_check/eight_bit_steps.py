"""Steps with the blocks' products in eight bits and in bf16: speed, memory, loss, gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from albert_ds.data.stream_config import StreamConfig
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import SIZES
from albert_lab.gpu_check.eight_bits import NOT_RUN, takes_eight_bits
from albert_lab.gpu_check.records import Records
from albert_lab.gpu_check.steps import Bench, measure_speed
from albert_lab.measurement import synthetic_batches

MICRO, STEPS = 32, 7  # sequences of 512 tokens in a micro-batch; steps of a cell


def measure_steps(records: Records, quick: bool) -> None:
    """xxlarge and xlarge, each with the same seed and batches in both; nothing narrower may run."""
    if quick or not takes_eight_bits():
        records.measure("fp8 steps", lambda: NOT_RUN)
        return
    bench = Bench(False)
    for size in ("albert-xxlarge", "albert-xlarge"):
        for eight_bits in (True, False):
            profiled = eight_bits and records.left() > 15
            options = {"most": STEPS, "eight_bits": eight_bits}
            work = partial(measure_speed, bench, size, MICRO, "none", profiled, **options)
            records.measure("fp8 steps", work, size=size, micro=MICRO, fp8=eight_bits)
        if size == "albert-xxlarge":
            compare = partial(compare_gradients, "albert-xlarge", rows=4)
            records.measure("fp8 gradients", compare, size="albert-xlarge")


def compare_gradients(name: str, rows: int) -> dict:
    """How far gradients in bf16 and with eight bits are off fp32's, over the latter's norm."""
    config = replace(SIZES[name], dropout=0.0)
    batches = synthetic_batches(
        StreamConfig(), vocab_size=config.vocab_size, micro_batch_size=rows, seed=0
    )
    inputs = next(batches).on(torch.device("cuda"))
    exact = take_gradients(config, inputs, torch.float32)
    distances = {}
    for kind, eight_bits in (("bf16", False), ("fp8", True)):
        made = take_gradients(config, inputs, torch.bfloat16, eight_bits=eight_bits)
        missed = {n: float((made[n] - x).norm() / x.norm()) for n, x in exact.items()}
        squares = (
            sum(float(each.norm()) ** 2 for each in of.values())
            for of in ({n: made[n] - x for n, x in exact.items()}, exact)
        )
        above, below = squares
        distances[f"{kind} all"] = round((above / below) ** 0.5, 5)
        for part in ("attention", "ffn", "embeddings"):
            worst = max((n for n in missed if part in n), key=lambda n: missed[n])
            distances[f"{kind} worst of {part}"] = f"{missed[worst]:.4f} {worst}"
    return distances


def take_gradients(config, inputs: dict, dtype, *, eight_bits: bool = False) -> dict[str, Tensor]:
    """The gradients of the sum of all losses at the first weights, but for those that are noise."""
    model = AlbertForPretraining(config, seed=1).to("cuda", dtype)
    model.albert.encoder.eight_bits = eight_bits
    out = model(**inputs)
    (out["mlm_loss_sum"] + out["pair_loss_sum"]).backward()
    named = ((n, p.grad) for n, p in model.named_parameters() if "key.bias" not in n)
    return {name: x.float() for name, x in named if x is not None}
