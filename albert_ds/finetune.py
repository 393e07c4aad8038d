"""Fine-tune ALBERT under DeepSpeed: `deepspeed albert_ds/finetune.py --task glue/mrpc ...`.

The loop is training/finetune.py. It is imported after the command line has been read, because it
imports torch: so `--help` and a mistyped flag answer at once.
"""

import sys

from albert_ds.model.shapes import count_params
from albert_ds.process.ending import run_trainer
from albert_ds.process.world import check_memory
from albert_ds.settings.finetune import read_config
from albert_ds.settings.shared import fingerprint
from albert_ds.training.trainer import TrainerProcess


def main(argv: list[str]) -> int:
    with TrainerProcess(argv) as process:  # however this block ends, all ranks end alike
        world = process.read_world()
        config, opened = read_config(argv, world_size=world.size)
        from albert_ds.training.finetune import prepare, print_results, tune_seeds

        mesh = process.connect(config, fingerprint(config, opened, world.size))
        check_memory(sum(count_params(config.model).values()), world, process.device.type)
        lock = process.lock()
        splits = prepare(config, opened, mesh)
        tune_seeds(config, opened, splits, process, lock)
        if mesh.rank == 0:
            print_results(config)
    return process.code


if __name__ == "__main__":
    run_trainer(main, sys.argv[1:])
