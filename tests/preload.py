"""What every rank imports. On a machine without CUDA it is imported once, and ranks are forked.

Collectives are counted from before DeepSpeed and megatron-core take references to them, as the
trainer itself does it.
"""

from albert_ds.runtime.comm_counter import record_traffic

TRAFFIC = record_traffic()

import deepspeed  # noqa: E402, F401
import megatron.core  # noqa: E402, F401

import albert_ds.parallel.tensor  # noqa: E402, F401
import albert_ds.runtime.checkpoint  # noqa: E402, F401
import albert_ds.train  # noqa: E402, F401
