"""Pretrain ALBERT under DeepSpeed: `deepspeed albert_ds/train.py --model ... --data ...`.

The loop is pretraining/loop.py. Heavy libraries are imported after the command line has been read,
so that `--help` and a mistyped flag answer at once.
"""

import sys

from albert_ds.process.trainer import TrainerProcess, run_trainer
from albert_ds.report.traffic import record_traffic
from albert_ds.settings.pretrain import read_config, resolve_workers, write_run_files


def main(argv: list[str]) -> int:
    def work(process: TrainerProcess) -> None:
        config = read_config(argv, world_size=process.world.size)
        traffic = record_traffic()  # before DeepSpeed takes references to the collectives
        from albert_ds.pretraining.loop import describe_data, list_results, prepare, stage, train

        mesh = process.meet(config)
        config = resolve_workers(config, process.device.type)
        staged = stage(config, mesh)
        process.claim(config.run, lambda: write_run_files(config))
        run = process.run = prepare(staged, mesh, process.device, traffic, process.follow)
        run.lock = process.lock
        title = f"pretraining: {config.output}, {run.step:,} of {config.steps:,} steps done"
        process.introduce(config, run.engine, config.size, title, describe_data(config))
        train(run, process.request)
        process.conclude(config, list_results(config))

    return run_trainer(argv, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
