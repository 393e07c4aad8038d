"""The constants of GPUs: from datasheets, or measured on a user's own machine.

They are inputs, each with its source. They are no results of this project, and no error is claimed
for them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from albert_ds.base.cli import Range
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check, read_json
from albert_lab.scaling.step_time import Machine

# Hidden size -> share of the peak that a step of large passes reached on one H200: rows of 512
# tokens, 256, 128, 32 and 32 a micro-batch (docs/raw/gpu_h200_2_report.md). Between them: a line.
MFU = {768: 0.404, 1024: 0.461, 2048: 0.561, 4096: 0.644}
# The same with the blocks' products in fp8, of the peak in bf16 (docs/raw/gpu_h200_3_report.md).
EIGHT_BIT_MFU = {2048: 0.714, 4096: 0.954}
# Share of the peak in one large matrix product, and of the memory's bandwidth in one large copy
# (docs/raw/gpu_h100_1_report.md).
LARGE_PRODUCT, LARGE_COPY = 0.77, 0.89
STREAMED = 0.8  # share of the memory's bandwidth that elementwise kernels reach (assumed)
ACHIEVED = 0.8  # share of the bandwidth between GPUs that a ring reaches (assumed)
PCIE = 25e9  # bytes/s between GPUs of a node, where a report does not say (assumed)
LINK_COST = 1 / 0.9  # a collective's time over the link's nominal time (assumed)
ALPHA = 5e-6  # seconds of a message between nodes (assumed)
# Bytes of memory traffic, counted. A pass reads a weight twice in bf16 and adds to its gradient.
# LAMB is clipping, a product, one fused Adam, two norms and the update, in fp32. On every rank
# the gradient of each parameter is cast and summed, and its weight is cast.
WEIGHT_BYTES, UPDATE_BYTES, PARAMETER_BYTES = 10, 64, 20
# The host's, of a layer, forward and backward: what albert-large took with 8 rows of 512 tokens a
# micro-batch on one H100 (docs/raw/gpu_h100_5_report.md); albert-base took 2.1e-3, and 2.7e-3 on a
# slower host (docs/raw/gpu_h200_2_report.md).
LAUNCH_SECONDS = 1.7e-3

SOURCES = (
    "peak, memory and NVLink: NVIDIA's A100, H100 and H200 SXM datasheets; share of the peak by "
    "hidden size: measured on one H200, the host's time: on one H100 (docs/gpu.md); the rest is "
    "assumed and stated in tools/albert_lab/scaling/hardware.py"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Rates of a GPU, per second, and its memory."""

    name: str
    flops: float  # dense bf16, at its peak
    memory_bandwidth: float  # bytes
    link_bandwidth: float  # bytes to another GPU of the node, one way
    memory: float  # bytes
    source: str = SOURCES


_SXM = (  # datasheets: peak, memory's bandwidth, NVLink in one direction, memory
    ("A100", 312e12, 2.04e12, 300e9, 80e9),
    ("H100", 989e12, 3.35e12, 450e9, 80e9),
    ("H200", 989e12, 4.8e12, 450e9, 141e9),
)
GPUS: dict[str, Gpu] = {
    name.lower(): Gpu(
        name=name, flops=peak, memory_bandwidth=bandwidth, link_bandwidth=link, memory=memory
    )
    for name, peak, bandwidth, link, memory in _SXM
}


def read_gpu(text: str) -> Gpu:
    """A GPU of `GPUS`, or the one that the JSON file `text` describes. Raises UserError."""
    if text in GPUS:
        return GPUS[text]
    name = f"--hardware {text}"
    if not Path(text).is_file():
        raise UserError(f"{name}: no such file; allowed: {', '.join(GPUS)} or a report (JSON)")
    report = read_json(Path(text), name)
    rate = Range(gt=0)
    rates = dict.fromkeys(("bf16_tflops", "memory_bytes", "memory_bandwidth_gb_s"), rate)
    check(report, {"device": str, **rates}, name)
    return Gpu(
        name=report["device"],
        flops=1e12 * report["bf16_tflops"] / LARGE_PRODUCT,
        memory_bandwidth=1e9 * report["memory_bandwidth_gb_s"] / LARGE_COPY,
        link_bandwidth=PCIE,
        memory=report["memory_bytes"],
        source=f"matrix products and memory: {text}; between GPUs of a node {PCIE / 1e9:g} GB/s "
        "(assumed); the rest is assumed and stated in tools/albert_lab/scaling/hardware.py",
    )


def describe_gpu(
    gpu: Gpu, *, width: int, mfu: float | None = None, eight_bits: bool = False
) -> Machine:
    """Constants of a rank with this GPU, for a model `width` wide. mfu: instead of MFU's."""
    shares = EIGHT_BIT_MFU if eight_bits else MFU
    mfu = mfu or float(np.interp(width, list(shares), list(shares.values())))
    streamed = STREAMED * gpu.memory_bandwidth
    in_a_node = 1 / (ACHIEVED * gpu.link_bandwidth)
    return Machine(
        name=gpu.name,
        source=gpu.source,
        a_flop=1 / (mfu * gpu.flops),
        a_weight=WEIGHT_BYTES / streamed,
        a_layer=LAUNCH_SECONDS,
        an_update=UPDATE_BYTES / streamed,
        a_parameter=PARAMETER_BYTES / streamed,
        alpha=ALPHA,
        beta=in_a_node,
        beta_gather=in_a_node,
        link_cost=LINK_COST,
        link_cost_gather=LINK_COST,
    )
