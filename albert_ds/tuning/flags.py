"""The flags of fine-tuning, with their units and defaults."""

import argparse
from pathlib import Path

from albert_ds.flags import Parser, natural, positive


def build_parser(tasks) -> Parser:
    """The parser; `tasks` are the names that --task takes."""
    parser = Parser(
        prog="deepspeed albert_ds/finetune.py",
        description="Fine-tune ALBERT on a task and judge it on its dev set (section 4.9). Given "
        "the same --output again, resumes.",
        allow_abbrev=False,
    )
    _add_run(parser.add_argument_group("what to tune"), tasks)
    _add_start(parser.add_argument_group("where to start"))
    _add_settings(parser.add_argument_group("settings (defaults: the task's, as released)"))
    _add_layout(parser.add_argument_group("layout (changes no number)"))
    _add_rhythm(parser.add_argument_group("rhythm, in optimizer steps"))
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser


def _add_run(group, tasks) -> None:
    add = group.add_argument
    add("--task", required=True, choices=tasks, help="what to learn")
    add(
        "--data",
        required=True,
        type=Path,
        metavar="TASKDIR",
        help="folder with the task's files as published: {train,dev,test}.tsv; "
        "{train,dev}-{v1.1,v2.0}.json; {train,dev,test}/{middle,high}/*.txt",
    )
    add(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="RUN_OR_HF",
        help="pretrained run, converted checkpoint or Hugging Face folder",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="folder of the results")
    add("--seed", type=natural, default=0, metavar="N", help="the first (default: %(default)s)")
    add(
        "--seeds",
        type=positive,
        default=1,
        metavar="N",
        help="runs, each with a seed of its own and a folder DIR/seed-S; DIR/results.json has the "
        "median, mean and spread (default: %(default)s, straight in DIR)",
    )


def _add_start(group) -> None:
    add = group.add_argument
    add(
        "--from-task",
        metavar="DIR",
        help="start from the encoder of a model fine-tuned on another task (the paper: RTE, STS-B "
        "and MRPC from MNLI): its --output, or the name of one beside this --output",
    )
    add(
        "--from-scratch",
        action="store_true",
        help="take the checkpoint's shape and vocabulary, but random weights: the baseline",
    )


def _add_settings(group) -> None:
    add = group.add_argument
    add("--steps", type=positive, metavar="N", help="optimizer steps")
    add(
        "--batch-size",
        type=positive,
        metavar="B",
        help="examples (SQuAD: windows) of one optimizer step, all ranks together",
    )
    add("--learning-rate", type=float, metavar="LR", help="peak")
    add("--warmup-steps", type=natural, metavar="N", help="linear warm-up")
    add("--dropout", type=float, metavar="P", help="of ALBERT itself")
    add("--classifier-dropout", type=float, metavar="P", help="before the task's head")
    add("--sequence-length", type=positive, metavar="T", help="longest sequence in tokens")
    add(
        "--question-length",
        type=positive,
        metavar="T",
        help="SQuAD: first tokens of a question; RACE: last tokens of question and option",
    )
    add("--stride", type=positive, metavar="T", help="SQuAD: tokens from window to window")
    add("--answer-length", type=positive, metavar="T", help="SQuAD: longest answer in tokens")
    add(
        "--patience",
        type=positive,
        metavar="N",
        help="end after N evaluations without a better one (default: all steps; the best "
        "evaluation is what is kept in any case)",
    )


def _add_layout(group) -> None:
    add = group.add_argument
    add(
        "--deepspeed_config",
        type=Path,
        metavar="FILE",
        help="DeepSpeed's JSON (default: ds_configs/zero1_fp32_adamw.json)",
    )
    add(
        "--micro-batch-size",
        type=positive,
        metavar="b",
        help="of one pass on one rank (default: the whole share of a rank)",
    )
    add(
        "--tensor-parallel",
        type=positive,
        metavar="T",
        default=1,
        help="ranks the shared block is cut over (default: %(default)s)",
    )
    add(
        "--activation-checkpointing",
        choices=("none", "attention", "block"),
        default="none",
        help="what backward computes again instead of keeping (default: %(default)s)",
    )
    add(
        "--cache",
        type=Path,
        metavar="DIR",
        help="tokenised features, by content; runs may share it (default: DIR/features)",
    )


def _add_rhythm(group) -> None:
    add = group.add_argument
    add("--log-every", type=positive, default=50, metavar="N", help="(default: %(default)s)")
    add("--eval-every", type=positive, metavar="N", help="(default: a tenth of --steps)")
    add("--save-every", type=positive, metavar="N", help="(default: as --eval-every)")
    add(
        "--max-hours",
        type=float,
        metavar="H",
        help="stop with a complete checkpoint after this long (default: no limit)",
    )
    add(
        "--timeout-minutes",
        type=float,
        default=10,
        metavar="M",
        help="end when a rank is missing or holds the others up for this long "
        "(default: %(default)s)",
    )
