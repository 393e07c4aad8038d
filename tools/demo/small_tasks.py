"""Small copies of tasks' published files, in the same formats, for runs that fit a small machine.

Drawn at random by --seed: rows of a GLUE table, in the order they have there; whole paragraphs of
SQuAD and whole passages of RACE, until there are enough questions. Sets without public labels are
left out.

python tools/demo/small_tasks.py --files FILES --output TASKS --tasks squad1 sst2 race --train 2000
"""

import json
import random
import shutil
from pathlib import Path

from albert_ds.base.cli import Parser, non_negative, positive, run
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import refuse_input, write_file
from albert_ds.base.json_files import read_data
from albert_ds.tasks.glue import GLUE
from albert_ds.tasks.race import read_passage
from albert_ds.tasks.squad.dataset import WITHOUT_ANSWERS

SQUAD = {"squad1": "v1.1", "squad2": "v2.0"}


def build_parser() -> Parser:
    parser = Parser(prog="tools/demo/small_tasks.py", description=__doc__.splitlines()[0])
    add = parser.add
    text = "folder with what there is of glue/CoLA ..., squad/*.json, RACE/{train,dev}"
    add("--files", text, type=Path, required=True)
    add("--output", "folder of the copies, one a task", type=Path, required=True)
    add("--tasks", "which ones", nargs="+", choices=[*GLUE, *SQUAD, "race"], required=True)
    add("--train", "training examples", "EXAMPLES", positive, default=2000)
    add("--dev", "examples of the dev set", "EXAMPLES", positive, default=500)
    add("--levels", "of RACE", nargs="+", choices=("middle", "high"), default=("middle", "high"))
    add("--seed", "seed of the choice of examples", "N", non_negative, default=0)
    return parser


def cut_table(source: Path, target: Path, *, has_header: bool, count: int, seed: int) -> int:
    """Copy `count` rows; returns how many there are."""
    with source.open(encoding="utf-8", newline="\n") as file:
        lines = list(file)
    refuse_input(target, [source])
    head = lines[:has_header]
    rows = lines[has_header:]
    kept = sorted(random.Random(seed).sample(range(len(rows)), min(count, len(rows))))
    write_file(target, "".join([*head, *(rows[i] for i in kept)]))
    return len(kept)


def cut_squad(source: Path, target: Path, *, count: int, seed: int) -> int:
    """Copy whole paragraphs, an article each, with `count` questions or a few more."""
    refuse_input(target, [source])
    content = read_data(source, WITHOUT_ANSWERS)
    every = [(a.get("title", ""), p) for a in content["data"] for p in a["paragraphs"]]
    kept = []
    questions = 0
    for title, paragraph in random.Random(seed).sample(every, len(every)):
        if questions >= count:
            break
        kept.append({"title": title, "paragraphs": [paragraph]})
        questions += len(paragraph["qas"])
    write_file(target, json.dumps({**content, "data": kept}))
    return questions


def cut_race(source: Path, target: Path, levels, *, count: int, seed: int) -> int:
    """Copy whole passages with `count` questions or a few more."""
    every = sorted(path for level in levels for path in (source / level).glob("*.txt"))
    questions = 0
    for path in random.Random(seed).sample(every, len(every)):
        if questions >= count:
            break
        folder = target / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        refuse_input(folder / path.name, [path])
        shutil.copyfile(path, folder / path.name)
        questions += len(read_passage(path)[1])
    return questions


def cut(args, name: str) -> dict[str, int]:
    """Copy one task; examples of each split."""
    counts = {}
    for split, count in (("train", args.train), ("dev", args.dev)):
        given = {"count": count, "seed": args.seed}
        if name == "race":
            source = args.files / "RACE" / split
            target = args.output / "RACE" / split
            counts[split] = cut_race(source, target, args.levels, **given)
            continue
        if name in SQUAD:
            source = args.files / "squad"
            folder = args.output / name
            file = f"{split}-{SQUAD[name]}.json"
            folder.mkdir(parents=True, exist_ok=True)
            counts[split] = cut_squad(source / file, folder / file, **given)
            continue
        task = GLUE[name]
        folder = args.output / task.folder
        folder.mkdir(parents=True, exist_ok=True)
        for which in task.dev_splits if split == "dev" else (split,):
            (source,) = task.files(args.files / "glue" / task.folder, which)
            given["has_header"] = not task.headless
            counts[which] = cut_table(source, folder / f"{which}.tsv", **given)
    return counts


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    for name in args.tasks:
        try:
            counts = cut(args, name)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            message = f"--files {args.files}: {name}: not as published: {error}"
            raise DamagedData(message) from None
        if not all(counts.values()):
            raise UserError(f"--files {args.files}: {name} has no examples there")
        print(f"{name}: " + ", ".join(f"{number:,} {split}" for split, number in counts.items()))


if __name__ == "__main__":
    run(main)
