"""The flags of pretraining, with their units and defaults (the fixed face of the product)."""

import argparse
from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.model.config import SIZES

DEFAULT_LEARNING_RATE = 0.00176  # the paper's, for a batch of 4096
SIZE_FLAGS = {
    "vocab_size": "V; the data's vocabulary decides",
    "embedding_size": "E",
    "hidden_size": "H",
    "num_layers": "L",
    "num_heads": "attention heads; must divide H",
    "ffn_size": "inner width of the feed-forward (4 H where --hidden-size is given)",
    "max_position_embeddings": "longest sequence the model can take",
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, ours."""

    def error(self, message: str):
        raise UserError(message)


def build_parser(defaults: dict) -> Parser:
    """The parser; `defaults` are those of the resolved configuration, by field name."""
    parser = Parser(
        prog="deepspeed albert_ds/train.py",
        description="Pretrain ALBERT (or a BERT baseline). Given the same --output again, resumes.",
        allow_abbrev=False,
    )
    _add_run(parser.add_argument_group("what to train"))
    _add_model(parser.add_argument_group("the model (defaults: those of --model)"))
    _add_task(parser.add_argument_group("the task"))
    _add_optimization(parser.add_argument_group("optimization"))
    _add_layout(parser.add_argument_group("layout (changes no number)"))
    _add_rhythm(parser.add_argument_group("rhythm, in optimizer steps"))
    parser.set_defaults(**defaults)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser


def _add_run(group) -> None:
    add = group.add_argument
    add("--model", required=True, choices=SIZES, help="size, the paper's Table 1")
    add("--data", required=True, nargs="+", metavar="DATA", help="folders made by build_shards.py")
    add("--output", required=True, metavar="RUN", help="folder of this run")
    add("--steps", required=True, type=positive, metavar="N", help="optimizer steps in all")
    add(
        "--batch-size",
        required=True,
        type=positive,
        metavar="B",
        help="samples of one optimizer step, all ranks together",
    )
    add(
        "--micro-batch-size",
        required=True,
        type=positive,
        metavar="b",
        help="samples of one pass on one rank",
    )
    add("--deepspeed_config", required=True, metavar="FILE", help="DeepSpeed's JSON (ds_configs/)")


def _add_model(group) -> None:
    add = group.add_argument
    for name, meaning in SIZE_FLAGS.items():
        add(as_flag(name), type=positive, metavar="N", default=argparse.SUPPRESS, help=meaning)
    add(
        "--sharing",
        metavar="HOW",
        default=argparse.SUPPRESS,
        help="all | attention | ffn | none | groups:N (default: all; for BERT none)",
    )
    add(
        "--dropout",
        type=float,
        metavar="P",
        default=argparse.SUPPRESS,
        help="probability (default: 0 for xxlarge, 0.1 for the others)",
    )


def _add_task(group) -> None:
    add = group.add_argument
    add(
        "--objective",
        choices=("sop", "nsp", "none"),
        default="sop",
        help="sentence loss beside MLM (default: sop)",
    )
    add(
        "--sequence-length",
        type=positive,
        metavar="T",
        help="longest sequence in tokens (default: as built)",
    )
    add(
        "--masked-fraction",
        type=float,
        default=0.15,
        metavar="P",
        help="share of a sequence's tokens to predict (default: %(default)s)",
    )
    add(
        "--max-predictions",
        type=positive,
        metavar="N",
        help="tokens of a sequence to predict at most; the release's 20 is 4 %% of 512 "
        "(default: no limit, as in the paper)",
    )
    add(
        "--max-ngram",
        type=positive,
        default=3,
        metavar="N",
        help="whole words masked together at most (default: %(default)s)",
    )
    add(
        "--word-boundaries",
        choices=("unicode", "released"),
        default="unicode",
        help="whole words of every script; released: only a-z continue a word (default: unicode)",
    )
    add(
        "--data-weights",
        nargs="+",
        type=float,
        metavar="W",
        help="share of each DATA in the samples (default: by size)",
    )
    add(
        "--seed",
        type=natural,
        metavar="N",
        help="of weights, data order, masks and dropout (default: %(default)s)",
    )


def _add_optimization(group) -> None:
    add = group.add_argument
    add(
        "--learning-rate",
        type=float,
        metavar="LR",
        help=f'peak, taken where the JSON says "auto" (default: {DEFAULT_LEARNING_RATE})',
    )
    add(
        "--warmup-steps",
        type=natural,
        metavar="N",
        help="linear warm-up (default: 2.5 %% of --steps)",
    )
    add(
        "--init-from",
        metavar="CHECKPOINT_OR_HF",
        help="start from the weights of a run or of a Hugging Face folder; layers take the blocks "
        "of the same relative depth, so depth may differ and sharing be less",
    )


def _add_layout(group) -> None:
    add = group.add_argument
    add(
        "--tensor-parallel",
        type=positive,
        metavar="T",
        help="ranks the shared block is cut over (default: %(default)s)",
    )
    add(
        "--activation-checkpointing",
        choices=("none", "attention", "block"),
        help="what backward computes again instead of keeping (default: %(default)s)",
    )
    add(
        "--compile",
        action="store_true",
        help="torch.compile the blocks, once for all layers that share them; dropout then draws "
        "otherwise",
    )
    add(
        "--num-workers",
        type=natural,
        metavar="N",
        help="loader processes a rank; 0: in the trainer itself (default: %(default)s)",
    )


def _add_rhythm(group) -> None:
    add = group.add_argument
    add("--log-every", type=positive, metavar="N", help="(default: %(default)s)")
    add("--eval-every", type=positive, metavar="N", help="(default: %(default)s)")
    add(
        "--eval-samples",
        type=positive,
        metavar="N",
        help="held-out samples at most (default: %(default)s)",
    )
    add("--save-every", type=positive, metavar="N", help="(default: %(default)s)")
    add(
        "--keep-last",
        type=positive,
        metavar="K",
        help="newest checkpoints kept (default: %(default)s)",
    )
    add(
        "--keep-every",
        type=positive,
        metavar="N",
        help="keep those of every N-th step for good as well (default: none)",
    )
    add(
        "--max-hours",
        type=float,
        metavar="H",
        help="stop with a complete checkpoint after this long (default: no limit)",
    )
    add(
        "--timeout-minutes",
        type=float,
        metavar="M",
        help="end when a rank is missing or holds the others up for this long "
        "(default: %(default)s)",
    )
    add("--wandb", action="store_true", help="log to Weights & Biases as well")


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def peek_output(argv: list[str]) -> Path | None:
    """The RUN folder of a command line that may be wrong elsewhere; None where it names none."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output", type=Path, nargs="?")
    return parser.parse_known_args(argv)[0].output
