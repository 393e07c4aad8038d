"""Pretrain ALBERT under DeepSpeed: `deepspeed albert_ds/train.py --model ... --data ...`.

The loop is training/pretrain.py. It is imported after the command line has been read, because it
imports torch: so `--help` and a mistyped flag answer at once.
"""

import sys

from albert_ds.model.shapes import count_params
from albert_ds.process.ending import run_trainer
from albert_ds.process.world import check_memory
from albert_ds.settings.pretrain import read_config, resolve_workers
from albert_ds.settings.shared import fingerprint
from albert_ds.training.trainer import TrainerProcess


def main(argv: list[str]) -> int:
    with TrainerProcess(argv) as process:  # however this block ends, all ranks end alike
        world = process.read_world()
        config, opened = read_config(argv, world_size=world.size)
        from albert_ds.parallel.consensus import raise_together
        from albert_ds.training import pretrain

        mesh = process.connect(config, fingerprint(config, opened, world.size))
        models = [config.model, *([opened.teacher.config] if opened.teacher else [])]
        sizes = [sum(count_params(model).values()) for model in models]
        check_memory(sizes[0], world, process.device.type, teacher=sum(sizes[1:]))
        config = resolve_workers(config, process.device.type)
        lock = process.lock()
        with raise_together(mesh):
            if mesh.rank == 0:
                pretrain.write_run_files(config, opened)
        run = pretrain.prepare(config, opened, mesh, process.device, lock)
        process.track(run)
        pretrain.print_start(run, opened)
        del opened  # the weights of --init-from
        pretrain.train(run, process.stop_request)
        if mesh.rank == 0:
            pretrain.print_results(config)
    return process.code


if __name__ == "__main__":
    run_trainer(main, sys.argv[1:])
