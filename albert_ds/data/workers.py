"""How a loader's worker process ends: with the trainer, and not with every other signal.

Slurm sends SIGTERM to every process of a job at once, and the trainer needs its workers for the
step after which it stops; torch's workers would end and take the trainer with them.
"""

import os
import signal
import threading


def end_with_the_trainer(worker: int) -> None:
    """In a new worker: let only the trainer's own SIGTERM end it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_the_trainer, args=(os.getppid(),), daemon=True).start()


def _await_the_trainer(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
