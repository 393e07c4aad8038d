"""What every rank imports. On a machine without CUDA it is imported once, and ranks are forked.

Collectives are observed from before DeepSpeed and megatron-core take references to them, as
`albert-ds traffic` and `bench` do it.
"""

from albert_lab.traffic import record_traffic

TRAFFIC = record_traffic()

import deepspeed  # noqa: E402, F401
import megatron.core  # noqa: E402, F401
import sklearn.linear_model  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  # optimizers of torch that tests compare with import it

import albert_ds.checkpoint.gather  # noqa: E402, F401
import albert_ds.evals.probe  # noqa: E402, F401
import albert_ds.parallel.tensor  # noqa: E402, F401
import albert_ds.training.finetune  # noqa: E402, F401
import albert_ds.training.pretrain  # noqa: E402, F401
