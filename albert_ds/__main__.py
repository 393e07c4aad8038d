"""`albert-ds COMMAND`: every command of the package under one name.

The module of a command is imported when that command is asked for, so `albert-ds --help` answers at
once.
"""

import sys
from functools import partial
from importlib import import_module

from albert_ds.base import cli
from albert_ds.commands.names import COMMANDS, OWN_WORD


def build_parser() -> cli.Parser:
    lines = ["commands; `albert-ds COMMAND --help` explains each one:"]
    for heading, commands in COMMANDS.items():
        lines += ["", f"  {heading}"]
        lines += [f"    {name:<11}{says}" for name, (_, says) in commands.items()]
    parser = cli.Parser(
        prog="albert-ds",
        description="Pretrain ALBERT from raw text, fine-tune it, export it to Hugging Face.",
        epilog="\n".join(lines),
    )
    names = [name for commands in COMMANDS.values() for name in commands]
    parser.add(
        "command", "one of the commands below, followed by its own flags", "COMMAND", choices=names
    )
    return parser


def main(argv: list[str]) -> int | None:
    name = build_parser().parse_args(argv[:1]).command
    module = next(commands[name][0] for commands in COMMANDS.values() if name in commands)
    words = argv if name in OWN_WORD else argv[1:]
    # What the command's own parser calls itself in its usage.
    sys.argv = ["albert-ds" if name in OWN_WORD else f"albert-ds {name}", *words]
    return import_module(module).main(words)


def run() -> None:
    command = main
    if sys.argv[1:2] in (["train"], ["finetune"]):
        command = partial(import_module("albert_ds.process.ending").run_trainer, main)
    cli.run(command)


if __name__ == "__main__":
    run()
