"""Compare a fine-tuning step with Hugging Face's Trainer: same model, batches and optimizer.

Both run in this process and take turns, round by round, so other load on the machine affects both.
A round's figure is the median of its steps. A step is everything from taking a batch to the
updated weights. Ours does not pad; the Trainer pads a batch to its longest sequence, as its own
collator does. The Trainer needs the package accelerate.
"""

import json
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

from albert_ds import cli
from albert_ds.cli import Parser, positive
from albert_ds.errors import UserError
from albert_ds.files import write_file
from albert_ds.lab.tables import table, three


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/finetune_bench.py", description=__doc__)
    add = parser.add_argument
    add("--task", required=True, help="a GLUE task (glue/rte, ...)")
    add("--data", required=True, type=Path, metavar="TASKDIR", help="its folder")
    add("--checkpoint", required=True, type=Path, metavar="RUN_OR_HF", help="pretrained model")
    add("--batch-size", type=positive, default=32, help="examples of a step")
    add("--steps", type=positive, default=10, help="steps of each per round")
    add("--rounds", type=positive, default=5, help="rounds of both")
    add("--output", type=cli.new_file, help="JSON with the same numbers")
    return parser


def open_run(args, folder: Path):
    """Our run, ready for its first step, with the recipe of the task."""
    from albert_ds.finetune import prepare
    from albert_ds.finetuning.config import read_config
    from albert_ds.finetuning.run import start
    from albert_ds.parallel.mesh import build_mesh
    from albert_ds.runtime.environment import read_world
    from albert_ds.runtime.rendezvous import join_world

    steps = args.steps * args.rounds
    argv = ["--task", args.task, "--data", args.data, "--checkpoint", args.checkpoint]
    argv += ["--output", folder / "run", "--batch-size", args.batch_size, "--steps", steps]
    config, typed = read_config([str(word) for word in argv], world_size=1)
    if config.head.kind != "classification":
        raise UserError(f"--task {args.task}: must be a classification: glue/rte, ...")
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

    from albert_ds.model.hugging_face import task_to_hf

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            # A later step begins where the last one ended, so it contains taking the batch.
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
    """A batch as the Trainer's collator makes it: padded to the longest sequence."""
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
    """The examples of our run's next `steps` batches, in order, for the Trainer."""
    import numpy as np

    from albert_ds.finetuning.run import draw_units

    features, examples = run.splits["train"].features, []
    for drawn in islice(draw_units(run.config, features.units, run.mesh, run.step), steps):
        for unit in drawn:
            ids, first = features.sequence(unit)
            examples.append(
                {
                    "input_ids": ids.astype(np.int64),
                    "token_type_ids": (np.arange(len(ids)) >= first).astype(np.int64),
                    "attention_mask": np.ones(len(ids), np.int64),
                    "labels": int(features.arrays["labels"][unit]),
                }
            )
    return examples


def measure(args) -> dict:
    """Median seconds of a step in every round, for both, and their ratio."""
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


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    found = measure(args)
    if args.output:
        write_file(args.output, json.dumps(found, indent=1) + "\n")
    rows = [
        [f"{title}, ms per step", *three([1000 * s for s in found["step_seconds"][name]], ".1f")]
        for name, title in (("ours", "albert-ds"), ("trainer", "Trainer"))
    ]
    rows.append(["Trainer / albert-ds", *three(found["trainer_over_ours"])])
    print(table((f"{args.rounds} rounds", "minimum", "median", "maximum"), rows))


if __name__ == "__main__":
    cli.run(main)
