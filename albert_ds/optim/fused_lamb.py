"""DeepSpeed's CUDA kernel, a different LAMB: where it runs, and how it is built.

docs/notebook/lamb.md compares them.
"""

import torch

from albert_ds.base.errors import UserError
from albert_ds.optim.adam import WEIGHT_DECAY, NamedParameters, decay_groups


def build_fused_lamb(
    parameters: NamedParameters, *, weight_decay: float = WEIGHT_DECAY, **params
) -> torch.optim.Optimizer:
    """Its CUDA extension is compiled here; UserError where it cannot be."""
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException

    try:
        return FusedLamb(decay_groups(parameters, weight_decay), **params)
    except torch.OutOfMemoryError:
        raise
    except (
        CUDAMismatchException,
        MissingCUDAException,
        RuntimeError,
        OSError,
        ValueError,
    ) as error:
        # ValueError: DeepSpeed cannot read an architecture like 9.0a in TORCH_CUDA_ARCH_LIST.
        lines = [*str(error).splitlines(), ""]  # a failed build's are all that was compiled
        reason = next((line for line in lines if "error:" in line), lines[0])
        raise UserError(
            '--deepspeed_config: "FusedLamb" needs the CUDA toolkit that torch was built with '
            f'(nvcc, in CUDA_HOME), and does not compile ({reason[:160]}); "Lamb" needs none'
        ) from None


def refuse_fused_lamb(ds_config: dict, tensor_parallel: int) -> str | None:
    """Why this device or layout cannot run it, if it cannot."""
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    if stage > 0:
        reason = (
            f"ZeRO stage {stage}: it uses the norm of a flat partition as that of a tensor, and "
            "is 43 to 52 % off its update after three steps on two ranks; allowed: stage 0"
        )
    elif tensor_parallel > 1:
        reason = (
            f"--tensor-parallel {tensor_parallel}: it uses the norm of a shard as that of a "
            "tensor, and is 3 % off its update after five steps on two ranks; allowed: 1"
        )
    elif not torch.cuda.is_available():
        reason = (
            "a machine without CUDA: its kernel exists for CUDA alone, DeepSpeed fails to "
            "build it in 9 of 9 combinations of stage and precision on a CPU"
        )
    else:
        return None
    return f'"FusedLamb" is refused with {reason}. "Lamb" is exact in every layout'
