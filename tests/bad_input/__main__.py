"""Run whole commands with wrong input and on machines that fail; count how each ended, by class.

python -m tests.bad_input --page docs/raw/bad_input.md --commands FOLDER

Wrong input of readers and parsers: test_readers.py.
"""

import argparse
import os
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

from albert_lab.tables import table

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bad_input import command_cases, commands  # noqa: E402

ROOT = Path(__file__).parents[2]


def import_all() -> None:
    """What the commands import: processes are then forked that have it."""
    import tests.preload  # noqa: F401
    from albert_ds.__main__ import COMMANDS

    modules = {module for group in COMMANDS.values() for module, _ in group.values()}
    for module in (*sorted(modules), "matplotlib.pyplot", "sentencepiece", "tokenizers"):
        import_module(module)


def as_table(tried: list[tuple]) -> str:
    """Counts by class as Markdown."""
    rows = []
    by_class = dict[str, Counter]()
    for name, _, verdict, _ in tried:
        by_class.setdefault(name, Counter())[verdict] += 1
    by_class["all"] = sum(by_class.values(), Counter())
    for name, verdicts in by_class.items():
        counts = [verdicts.total(), *(verdicts[verdict] for verdict in command_cases.VERDICTS)]
        rows.append([name, *(f"{count:,}" for count in counts)])
    return table(("class", "tried", *command_cases.VERDICTS), rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bad_input", description=__doc__)
    add = parser.add_argument
    add("--page", type=Path, help="page whose table is replaced")
    add("--share", type=float, default=1.0, help="share of the cases to try (%(default)s)")
    add("--commands", type=Path, metavar="FOLDER", required=True, help="keeps what was tried")
    add("--only", nargs="+", metavar="COMMAND", help="commands to run (all)")
    add("--seed", type=int, default=0, help="seed of the choice (%(default)s)")
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    import_all()
    tried = list(commands.try_commands(args.commands, args.share, args.seed, args.only))
    failed = [case for case in tried if case[2] != command_cases.AS_PROMISED]
    for case in failed:
        print(*(str(part)[:300] for part in case), sep=" | ")
    counts = as_table(tried)
    print(counts)
    if args.page:
        from tests.exactness.document import replace_section

        replace_section(args.page, "commands", [counts])
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
