"""Try wrong input of every kind and count how each ended, by class.

python -m tests.bad_input --page docs/raw/bad_input.md
python -m tests.bad_input --page docs/raw/bad_input.md --commands FOLDER

The first calls readers and parsers, the second runs whole commands, also on machines that fail.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

from albert_lab.tables import table

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bad_input import file_cases, flag_cases  # noqa: E402
from tests.bad_input.json_cases import list_json_cases, make_readers  # noqa: E402
from tests.bad_input.judge import AS_PROMISED, VERDICTS, Case, judge  # noqa: E402

ROOT = Path(__file__).parents[2]
# Class of wrong input -> its cases, and how many of them the whole command tries. Of flags it is
# always all: one escaped a sample until another flag moved the draw.
CLASSES: dict[str, tuple[Callable[..., Iterator[Case]], int]] = {
    "flags of every command": (flag_cases.list_flag_cases, 2000),
    "variables of launchers": (file_cases.list_world_cases, 300),
    "text, plain, packed and in tables": (file_cases.list_text_cases, 280),
    "text left out": (file_cases.list_left_out_cases, 200),
}
OF_JSON = 120  # values replaced in each file of JSON


def try_all(folder: Path, data: Path, share: float, seed: int = 0) -> Iterator[tuple]:
    """(class, what, verdict, what was said) of each case; `share` of them, the same every time."""
    listed = {name: partial(make, folder, data) for name, (make, _) in CLASSES.items()}
    counts = {name: count for name, (_, count) in CLASSES.items()}
    for name, reader in make_readers(folder, data).items():
        listed[name] = partial(list_json_cases, reader)
        counts[name] = OF_JSON
    for name, make in listed.items():
        for case in make(random.Random(seed), max(8, round(share * counts[name]))):
            yield name, case.what, *judge(case)


def build_data(folder: Path) -> Path:
    """A small built folder."""
    from albert_ds.vocab.vocab import RELEASED, train_vocab
    from tests.data.corpus import build, make_documents, write_wiki

    documents = make_documents(60)
    vocab = train_vocab([line for lines in documents for line in lines], RELEASED, vocab_size=240)
    build(folder / "built", vocab, [write_wiki(folder / "wiki_00", documents)])
    return folder / "built"


def import_all() -> None:
    """What the commands import: processes are then forked that have it."""
    import tests.preload  # noqa: F401
    from albert_ds.__main__ import COMMANDS

    modules = {module for group in COMMANDS.values() for module, _ in group.values()}
    for module in (*sorted(modules), "matplotlib.pyplot", "sentencepiece", "tokenizers"):
        import_module(module)


def as_table(tried: list[tuple], verdicts: tuple[str, ...] = VERDICTS) -> str:
    """Counts by class as Markdown."""
    rows, by_class = [], dict[str, Counter]()
    for name, _, verdict, _ in tried:
        by_class.setdefault(name, Counter())[verdict] += 1
    by_class["all"] = sum(by_class.values(), Counter())
    for name, found in by_class.items():
        counts = [found.total(), *(found[verdict] for verdict in verdicts)]
        rows.append([name, *(f"{count:,}" for count in counts)])
    return table(("class", "tried", *verdicts), rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bad_input", description=__doc__)
    add = parser.add_argument
    add("--page", type=Path, help="page whose table is replaced")
    add("--share", type=float, default=1.0, help="share of the cases to try (%(default)s)")
    add("--commands", type=Path, metavar="FOLDER", help="run commands; FOLDER keeps what was tried")
    add("--only", nargs="+", metavar="COMMAND", help="commands to run (all)")
    add("--seed", type=int, default=0, help="seed of the choice (%(default)s)")
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    verdicts, section = VERDICTS, "bad input"
    if args.commands:
        import_all()
        from tests.bad_input import command_cases, commands

        verdicts, section = command_cases.VERDICTS, "commands"
        tried = list(commands.try_commands(args.commands, args.share, args.seed, args.only))
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "work").mkdir()
            tried = list(try_all(folder / "work", build_data(folder), args.share, args.seed))
    failed = [case for case in tried if case[2] != AS_PROMISED]
    for case in failed:
        print(*(str(part)[:300] for part in case), sep=" | ")
    counts = as_table(tried, verdicts)
    print(counts)
    if args.page:
        from tests.exactness.document import replace_section

        replace_section(args.page, section, [counts])
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
