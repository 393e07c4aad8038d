"""A fine-tuning step here and in Hugging Face's Trainer: same model, batches, optimizer, machine.

Both run in this process, in rounds of one after the other, so that whatever else the machine does
falls on both; a round's figure is the median of its steps. A step is everything from taking a batch
to the updated weights. Ours does not pad; the Trainer pads a batch to its longest sequence, as its
own collator does. Needs the package accelerate, as it does.

python tools/finetune_bench.py --task glue/rte --data TASKDIR --checkpoint RUN_OR_HF
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser, positive
from albert_ds.runtime.ending import say


def build_parser() -> Parser:
    parser = Parser(prog="tools/finetune_bench.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--task", required=True, help="a GLUE task (glue/rte, ...)")
    add("--data", required=True, type=Path, metavar="TASKDIR", help="its folder")
    add("--checkpoint", required=True, type=Path, metavar="RUN_OR_HF", help="pretrained model")
    add("--batch-size", type=positive, default=32, help="examples a step (default: %(default)s)")
    add("--steps", type=positive, default=10, help="steps of each a round (default: %(default)s)")
    add("--rounds", type=positive, default=5, help="(default: %(default)s)")
    add("--output", type=Path, help="JSON with the same numbers")
    return parser


def open_run(args, folder: Path):
    """Our run, ready for its first step, dropout and all as the task's recipe has it."""
    from albert_ds.finetune import prepare
    from albert_ds.parallel.mesh import build_mesh
    from albert_ds.runtime.launch import join_world, read_world
    from albert_ds.tuning.config import read_config
    from albert_ds.tuning.run import start

    steps = args.steps * args.rounds
    argv = ["--task", args.task, "--data", args.data, "--checkpoint", args.checkpoint]
    argv += ["--output", folder / "run", "--batch-size", args.batch_size, "--steps", steps]
    config, typed = read_config([str(word) for word in argv], world_size=1)
    if config.head.kind != "classification":
        raise UserError(f"--task {args.task}: must be one that classifies: glue/rte, ...")
    device, mesh = join_world(read_world()), build_mesh(1)
    config, splits = prepare(config, typed, mesh)
    return start(config, splits, mesh, device)


def open_trainer(run, folder: Path, steps: int, times: list[float]):
    """Hugging Face's Trainer on the same weights and the same examples in the same order."""
    import torch
    from transformers import (
        AlbertConfig,
        AlbertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from albert_ds.model.hugging_face_tasks import task_to_hf

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            # Later steps begin where the last one ended, so that they contain taking the batch.
            self.started = getattr(self, "started", None) or time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            now = time.perf_counter()
            times.append(now - self.started)
            self.started = now

    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(range(steps * run.config.batch_size))

    config = run.config
    state = run.engine.deepspeed.module.state_dict()
    hf_config, hf_state = task_to_hf(config.model, config.head, state, "")
    model = AlbertForSequenceClassification(AlbertConfig(**hf_config))
    model.load_state_dict({name: x.clone() for name, x in hf_state.items()})
    params = config.deepspeed["optimizer"]["params"]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=config.batch_size,
        max_steps=steps,
        learning_rate=params["lr"],
        adam_epsilon=params["eps"],
        weight_decay=params["weight_decay"],
        warmup_steps=config.warmup_steps,
        max_grad_norm=config.deepspeed["gradient_clipping"],
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return lambda examples: InOrder(
        model=model,
        args=arguments,
        train_dataset=examples,
        data_collator=pad_examples,
        callbacks=[Clock()],
    ).train()


def pad_examples(examples: list[dict]) -> dict:
    """What the Trainer's collator makes of a batch: all as long as the longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def pad(name: str):
        return pad_sequence([torch.as_tensor(e[name]) for e in examples], batch_first=True)

    return {
        "input_ids": pad("input_ids"),
        "token_type_ids": pad("token_type_ids"),
        "attention_mask": pad("attention_mask"),
        "labels": torch.tensor([e["labels"] for e in examples]),
    }


def list_examples(run, steps: int) -> list[dict]:
    """The next `steps` batches of our run, one example after the other, for the Trainer."""
    import numpy as np

    from albert_ds.tuning.run import units_of_step

    features, examples, step = run.splits["train"].features, [], run.step
    for run.step in range(step, step + steps):
        for unit in units_of_step(run):
            ids, first = features.sequence(unit)
            examples.append(
                {
                    "input_ids": ids.astype(np.int64),
                    "token_type_ids": (np.arange(len(ids)) >= first).astype(np.int64),
                    "attention_mask": np.ones(len(ids), np.int64),
                    "labels": int(features.arrays["labels"][unit]),
                }
            )
    run.step = step
    return examples


def measure(args) -> dict:
    """Median seconds of a step of both in every round, and their ratio."""
    from albert_ds.finetune import train_step

    with tempfile.TemporaryDirectory() as folder:
        run = open_run(args, Path(folder))
        theirs: list[float] = []
        train_theirs = open_trainer(run, Path(folder), args.steps, theirs)
        rounds: dict[str, list[float]] = {"ours": [], "trainer": []}
        for _ in range(args.rounds):
            examples, ours = list_examples(run, args.steps), []
            for _ in range(args.steps):
                started = time.perf_counter()
                train_step(run)
                ours.append(time.perf_counter() - started)
            rounds["ours"].append(statistics.median(ours))
            theirs.clear()
            train_theirs(examples)
            assert len(theirs) == args.steps
            rounds["trainer"].append(statistics.median(theirs))
    ratios = [b / a for a, b in zip(rounds["ours"], rounds["trainer"], strict=True)]
    return {
        "task": args.task,
        "batch_size": args.batch_size,
        "steps": args.steps,
        "step_seconds": rounds,
        "trainer_over_ours": ratios,
    }


def spread(values: list[float], scale: float = 1) -> str:
    """`minimum | median | maximum` of the rounds."""
    found = (min(values), statistics.median(values), max(values))
    return " | ".join(f"{scale * x:.{1 if scale > 1 else 2}f}" for x in found)


def main(argv: list[str] | None = None) -> int:
    try:
        args = build_parser().parse_args(argv)
        found = measure(args)
    except ENDINGS as ending:
        say(str(ending))
        return ending.code
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    seconds = found["step_seconds"]
    print(f"| {args.rounds} rounds | minimum | median | maximum |\n| --- | --- | --- | --- |")
    print(f"| albert-ds, ms a step | {spread(seconds['ours'], 1000)} |")
    print(f"| Trainer, ms a step | {spread(seconds['trainer'], 1000)} |")
    print(f"| Trainer / albert-ds | {spread(found['trainer_over_ours'])} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
