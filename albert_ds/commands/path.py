"""Print where a file of the package lies: deepspeed --num_gpus 8 $(albert-ds path train) ..."""

from albert_ds.base import cli
from albert_ds.base.files import PACKAGE

FILES = {
    "train": "train.py",
    "finetune": "finetune.py",
    "ds_configs": "ds_configs",
    "slurm": "slurm",
}


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    parser.add("name", f"what to find: {', '.join(FILES)}", "NAME", choices=FILES)
    return parser


def main(argv: list[str]) -> None:
    print(PACKAGE / FILES[build_parser().parse_args(argv).name])
