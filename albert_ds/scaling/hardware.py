"""Machines that nobody measured here: constants that are inputs, each with where it comes from.

Nothing below is a result of this project, and no error bar is claimed for it.
"""

from dataclasses import dataclass

from albert_ds.errors import UserError
from albert_ds.scaling.predict import Machine

SOURCES = (
    "peak, memory and NVLink: NVIDIA's H100 and H200 SXM datasheets; share of the peak: "
    "BERT-large at 580 sequences/s on an A100 (NVIDIA DeepLearningExamples, BERT for PyTorch, 128 "
    "tokens) is 45 % of its dense peak, 941 to 965 on an H100 (MLPerf Training v3.1, Dell "
    "XE9680) 47 to 48 %; the rest is assumed and stated in albert_ds/scaling/hardware.py"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU in a machine of several, per second."""

    peak_flops: float  # dense bf16 (datasheet)
    memory_bytes: float  # bandwidth (datasheet)
    nvlink_bytes: float  # one way (datasheet: half of what is sent and received)
    capacity: float  # GB (datasheet)


GPUS = {
    "h100": Gpu(peak_flops=989e12, memory_bytes=3.35e12, nvlink_bytes=450e9, capacity=80),
    "h200": Gpu(peak_flops=989e12, memory_bytes=4.8e12, nvlink_bytes=450e9, capacity=141),
}
MFU = 0.45  # of the peak, in passes large enough (SOURCES)
STREAMED = 0.8  # of the memory's bandwidth, by elementwise kernels (assumed)
ACHIEVED = 0.8  # of NVLink's, by a ring (assumed)
LINK_COST = 1 / 0.9  # of a network's nominal time (assumed)
ALPHA = 5e-6  # seconds of a message between nodes (assumed)
# Bytes of memory traffic, counted: a pass reads a weight twice in bf16 and adds to its gradient;
# LAMB is a product, one fused Adam, two norms and the step, in fp32, after clipping; and whoever
# updates it, a parameter's gradient is cast and summed, and its weight cast.
WEIGHT_BYTES, UPDATE_BYTES, PARAMETER_BYTES = 10, 64, 20
# A layer is some 80 kernels forward and backward; a process launches one in 5 microseconds at
# best (assumed). CUDA graphs would take it away: --launch-seconds 0.
LAUNCH_SECONDS = 80 * 5e-6


def describe_gpu(
    name: str,
    *,
    mfu: float = MFU,
    overlap: float = 0.0,
    launch_seconds: float = LAUNCH_SECONDS,
) -> Machine:
    """Constants of one such GPU. Raises UserError for a share that is none."""
    for flag, value in (("--mfu", mfu), ("--overlap", overlap)):
        if not 0 <= value <= 1 or (flag == "--mfu" and value == 0):
            raise UserError(f"{flag} {value}: must be above 0 and at most 1 (overlap: from 0)")
    gpu = GPUS[name]
    streamed = STREAMED * gpu.memory_bytes
    return Machine(
        name=name,
        source=SOURCES,
        a_flop=1 / (mfu * gpu.peak_flops),
        a_weight=WEIGHT_BYTES / streamed,
        a_layer=launch_seconds,
        an_update=UPDATE_BYTES / streamed,
        a_parameter=PARAMETER_BYTES / streamed,
        alpha=ALPHA,
        beta=1 / (ACHIEVED * gpu.nvlink_bytes),
        beta_gather=1 / (ACHIEVED * gpu.nvlink_bytes),
        link_cost=LINK_COST,
        link_cost_gather=LINK_COST,
        overlap=overlap,
    )
