"""Fine-tune ALBERT under DeepSpeed: `deepspeed albert_ds/finetune.py --task glue/mrpc ...`.

The loop is finetuning/loop.py. Heavy libraries are imported after the command line has been read,
so that `--help` and a mistyped flag answer at once.
"""

import sys
from shlex import quote

from albert_ds.process.trainer import TrainerProcess, run_trainer
from albert_ds.settings.finetune import read_config


def main(argv: list[str]) -> int:
    def work(process: TrainerProcess) -> None:
        config, args = read_config(argv, world_size=process.world.size)
        from albert_ds.finetuning.loop import prepare, tune_seeds

        mesh = process.meet(config)
        process.claim(config.run)
        config, splits = prepare(config, args, mesh)
        tune_seeds(config, splits, process)
        run = quote(config.output)
        found = {
            "results": str(config.run / "results.json"),
            "curves": f"tensorboard --logdir {run}",
        }
        if config.seeds == 1:
            found["export"] = f"albert-ds export --checkpoint {run} --output {run}-hf"
        process.conclude(config, found)

    return run_trainer(argv, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
