"""Every two values of `train`'s flags together, and what such a run must keep.

python -m tests.flag_pairs FOLDER --page docs/raw/bad_input.md

Each row trains three steps with a checkpoint at two, goes on again from that one with one flag
changed that changes no number, is exported, and probed. All are forked from one process. FOLDER
keeps what was tried: the same command goes on.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from albert_lab.tables import table

from tests.bad_input.__main__ import import_all
from tests.bad_input.command_cases import Attempt, Place
from tests.bad_input.room import SMALL, build_inputs
from tests.conftest import ROOT
from tests.legs import files_of, rewind
from tests.models import folder_of

# None: the flag is left out.
VALUES: dict[str, tuple] = {
    "--sharing": ("all", "attention", "ffn", "none", "groups:2", "cycle:2", "loop:1,1x2,1"),
    "--per-layer": (None, "norm", "scale,position", "lora:2", "inject"),
    "--num-layers": (4, None),
    "--objective": ("sop", "nsp", "none"),
    "--dropout": (0, 0.1),
    "--depth-schedule": (None, "2@0,4@2", "2-4@0", "3@0,4@2"),
    "--exit-losses": (None, "2", "1:0.5,3"),
    "--z-loss": (None, 0.001),
    "--masked-fraction": (0.15, "0.4..0.15@100%"),
    "--max-ngram": (3, 1),
    "--max-predictions": (None, 4),
    "--word-boundaries": ("scripts", "released"),
    "--sequence-length": (64, 17, "32@0,64@2"),
    "--batch-size": (8, "8@0,16@2"),
    "--micro-batch-size": (8, 1, 4),
    "--data": (("data",), ("data", "data2")),
    "--init-from": (None, "start"),
    "--teacher": (None, "start"),
    "--seed": (0, 2**31),
    "--warmup-steps": (None, 0, 3),
    "--learning-rate": (None, 0.01),
    "--learning-rate-schedule": ("linear", "cosine", "wsd"),
    "--final-rate": (None, 0.1),
    "--cooldown": (None, 0.5),
    "--average": (None, 0.9),
    "--activation-checkpointing": ("none", "attention", "block"),
    "--num-workers": (0, 1),
    "--save-at-tokens": (None, "300"),
    "--save-at-words": (None, "100"),
    "--eval-samples": (8, 3),
    "--eval-every": (2, 1),
    "--deepspeed_config": tuple(
        f"ds_configs/{name}.json"
        for name in ("zero1_fp32", "zero0_fp32", "zero1_fp32_adamw", "zero1_fp32_muon")
        + ("zero1_bf16", "zero2_bf16", "zero3_bf16", "zero1_bf16_adamw", "zero1_bf16_muon")
    ),
}
FIXED = ("--hidden-size", 32, "--embedding-size", 16, "--steps", 3, "--save-every", 2)
FIXED = ("--model", "albert-tiny", *FIXED, "--log-every", 1, "--keep-last", 9)
# One of these changes in a resume; none changes a number.
CHANGES = (
    *(("--num-workers", 1), ("--log-every", 3), ("--eval-every", 3), ("--keep-last", 1)),
    *(("--timeout-minutes", 5), ("--max-hours", 1), ("--save-every", 1), ("--deterministic",)),
)
AS_PROMISED, REFUSED, OTHER = "as promised", "refused in one line", "other"
VERDICTS = (AS_PROMISED, REFUSED, OTHER)
ARRAYS = 3  # each with every two values: what one refuses meets other values in the next
CANDIDATES = 200  # random rows, of those allowed the one with most new pairs is taken
LOOP = "loop:1,1x2,1"


def list_rows(seed: int = 0) -> Iterator[dict]:
    """Rows of a value for each flag, until every two values have met that may; the same every
    time."""
    draw = random.Random(seed)
    cells = [(flag, value) for flag, values in VALUES.items() for value in values]
    left = {pair for pair in combinations(cells, 2) if pair[0][0] != pair[1][0]}
    while left:
        first = dict(min(left, key=repr))
        rows = [
            {flag: first.get(flag, draw.choice(values)) for flag, values in VALUES.items()}
            for _ in range(CANDIDATES)
        ]
        rows = [row for row in rows if is_allowed(row)]
        if not rows:  # such two never train together
            left.remove(min(left, key=repr))
            continue
        best = max(rows, key=lambda row: sum(pair in left for pair in combinations(row.items(), 2)))
        left -= {*combinations(best.items(), 2)}
        yield best


def is_allowed(row: dict) -> bool:
    """Whether nothing in the row is refused by a line of its own; other tests have these lines."""
    sharing, own, depth = row["--sharing"], row["--per-layer"], row["--depth-schedule"]
    return not (
        (row["--cooldown"] and row["--learning-rate-schedule"] != "wsd")
        or (own == "inject" and sharing not in ("all", LOOP))
        or (depth and sharing not in ("all", LOOP))
        or (depth in ("2@0,4@2", "2-4@0") and sharing == LOOP)
        or (row["--exit-losses"] and own == "scale,position")
    )


def as_words(row: dict) -> list:
    words: list = []
    for flag, value in row.items():
        if value is not None:
            words += [flag, *(value if isinstance(value, tuple) else (value,))]
    return words


def try_row(place: Place, row: dict, change: tuple) -> tuple[str, str]:
    """(one of VERDICTS, what was said)."""
    place.clear()

    def run(*words) -> tuple[int | None, str, str]:
        ((code, out, err),) = place.run(Attempt(what="", words=words))
        return code, out, err

    command = ("train", *FIXED, *as_words(row))
    code, _, said = run(*command, "--output", "out")
    last = said.strip().splitlines()[-1:] or [""]
    if code == 2 and last[0].startswith("albert-ds: ") and "--" in last[0]:
        return ("Traceback" in said and OTHER) or REFUSED, last[0]
    room = place.room
    if code != 0 or "Traceback" in said:
        return OTHER, f"train: {code}: {said[-600:]}"
    for line in (room / "out/metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        # A mean of nothing is null; a skipped step of bf16 would be too, and is counted.
        wrong = [k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
        if wrong or values.get("loss", values.get("heldout_loss")) is None:
            return OTHER, f"metrics: {line}"
    rewind(shutil.copytree(room / "out", room / "again"), 2)
    code, _, said = run(*command, *change, "--output", "again")
    if code != 0 or "resuming from" not in said:
        return OTHER, f"resume: {code}: {said[-600:]}"
    whole, again = (files_of(folder_of(room / name, 3)) for name in ("out", "again"))
    if whole != again:
        return OTHER, f"resumed with {change}: {dict(whole.items() ^ again.items())} differ"
    exports = []
    for name in ("out", "again"):
        code, _, said = run("export", "--checkpoint", name, "--output", f"hf-{name}")
        if code == 2 and "cannot be exported" in said:
            break
        if code != 0:
            return OTHER, f"export: {code}: {said[-600:]}"
        exports.append((room / f"hf-{name}" / "model.safetensors").read_bytes())
    if exports and exports[0] != exports[1]:
        return OTHER, "the exports differ"
    code, _, said = run(
        *("probe", "--checkpoint", "out", "--data", "data", "--samples", 8, "--head-samples", 8),
        *("--output", "probe.json"),
    )
    if code != 0:
        return OTHER, f"probe: {code}: {said[-600:]}"
    loss = json.loads((room / "probe.json").read_text())["heldout_mlm_loss"]
    is_exported = "exported" if exports else "has no counterpart in Hugging Face"
    return (AS_PROMISED if math.isfinite(loss) else OTHER), f"{is_exported}, loss {loss}"


def build_place(folder: Path) -> Place:
    """The room of tests/bad_input, with a second folder of shards and a run to start from."""
    room = folder / "room"
    room.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs"
    place = Place(inputs, room, [])
    if not (inputs / "start").exists():
        shutil.rmtree(inputs, ignore_errors=True)
        build_inputs(folder)
        place.clear()
        words = ("--input", "text.txt", "--vocab", "vocab/spiece.model", "--output", "data2")
        words += ("--sequence-length", 64, "--seed", 1)
        start = ("--steps", 1, "--batch-size", 8, "--micro-batch-size", 8, "--num-layers", 4)
        start = (*SMALL, *start, "--data", "data", "--deepspeed_config", "ds.json")
        for command in (("shards", *words), ("train", *start, "--output", "start")):
            ((code, _, err),) = place.run(Attempt(what="", words=command))
            assert code == 0, err
        shutil.copytree(ROOT / "ds_configs", inputs / "ds_configs", dirs_exist_ok=True)
        for name in ("data2", "start"):
            shutil.copytree(room / name, inputs / name)
    return place


def try_rows(folder: Path, number: int | None = None, arrays: int = ARRAYS) -> Iterator[tuple]:
    """(row, change, verdict, what was said); those in folder/tried.jsonl are done."""
    place = build_place(folder)
    record = folder / "tried.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    done = {tuple(entry[:2]): entry for entry in map(json.loads, lines)}
    draw = random.Random(0)
    rows = []
    for seed in range(arrays):
        rows += draw.sample(array := list(list_rows(seed)), len(array))
    for row in rows[:number]:
        change = draw.choice(CHANGES)
        key = (" ".join(map(str, as_words(row))), " ".join(map(str, change)))
        if key not in done:
            done[key] = [*key, *try_row(place, row, change)]
            with open(record, "a", encoding="utf-8") as writer:
                writer.write(json.dumps(done[key]) + "\n")
        yield tuple(done[key])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flag_pairs", description=__doc__)
    parser.add_argument("folder", type=Path, help="keeps what was tried")
    parser.add_argument("--rows", type=int, help="rows to try (all)")
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    import_all()
    tried = list(try_rows(args.folder.absolute(), args.rows))
    for row in tried:
        if row[2] == OTHER:
            print(*row, sep=" | ")
    counts = Counter(verdict for _, _, verdict, _ in tried)
    lines = table(("rows", *VERDICTS), [[str(len(tried)), *(str(counts[v]) for v in VERDICTS)]])
    print(lines)
    if args.page:
        from tests.exactness.document import replace_section

        replace_section(args.page, "flag pairs", [lines])
    return bool(counts[OTHER])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
