"""Silence the messages of libraries that are no news to the user, and no others."""

import logging
import warnings

# Warnings about which a user can do nothing: the beginning of the message, its category, and the
# module that it blames.
WARNINGS = (
    # They would serve megatron-core's optimizers and clipping, of which none is used here.
    ("Transformer Engine and Apex are not installed", UserWarning, r"megatron\.core\."),
    # DeepSpeed and megatron-core call torch's collectives by names that are about to go.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed\."),
)
# The same for what DeepSpeed logs.
LOGS = (
    # It says so of every optimizer but its own; tests compare ours with references under ZeRO.
    "**** You are using ZeRO with an untested optimizer",
)


def quiet_libraries() -> None:
    """Silence what WARNINGS and LOGS name."""
    for message, category, module in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.addFilter(lambda record: not record.getMessage().startswith(LOGS))
