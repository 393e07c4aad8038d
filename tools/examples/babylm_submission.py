"""The folder of a BabyLM submission (strict-small) from a run that train --save-at-words kept.

python tools/examples/babylm_submission.py --run runs/babylm --output submission --repo TEAM/NAME

Writes OUTPUT/main, the newest checkpoint; OUTPUT/revisions/chck_1M and so on; and OUTPUT/upload.sh,
which makes a branch of the Hub's repository of each.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

MOST_TEXT, MOST_SEEN = 10_000_000, 100_000_000
BEYOND = 1.01  # the step that reaches the last words goes beyond them
MILLIONS = [*range(1, 10), *range(10, 101, 10)]


def count_words(run: Path) -> tuple[int, int]:
    """Words of the text of a run, and those that it has seen."""
    folders = json.loads((run / "config.json").read_text())["data"]
    indexes = [json.loads(Path(folder, "index.json").read_text()) for folder in folders]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = [record["words"] for record in records if "words" in record]
    if not seen:
        sys.exit(f"{run}: counts no words: train with --save-at-words")
    return sum(index["counts"]["words"] for index in indexes), seen[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--repo", required=True, help="repository of the Hub, for upload.sh")
    args = parser.parse_args()
    text, seen = count_words(args.run)
    print(f"{text:,} words of text, {seen:,} seen")
    for words, most in ((text, MOST_TEXT), (seen, BEYOND * MOST_SEEN)):
        if words > most:
            sys.exit(f"{words:,} words: strict-small allows {most:,.0f}")
    revisions = args.output / "revisions"
    for output, *more in ([args.output / "main"], [revisions, "--revision-per-checkpoint"]):
        export = [sys.executable, "-m", "albert_ds", "export", "--checkpoint", args.run]
        if code := subprocess.run([*export, "--output", output, *more]).returncode:
            sys.exit(code)
    made = sorted(revisions.glob("chck_*"), key=lambda path: float(path.name[5:-1]))
    wanted = {f"chck_{number}M" for number in MILLIONS if number * 10**6 <= seen}
    print("lacking:", ", ".join(sorted(wanted - {path.name for path in made})) or "none")
    lines = [f"hf upload {shlex.quote(args.repo)} main"]
    lines += [f"{lines[0][:-4]}revisions/{p.name} --revision {p.name}" for p in made]
    (args.output / "upload.sh").write_text("\n".join(lines) + "\n")
    print(f"wrote {args.output}: {len(made)} revisions")


if __name__ == "__main__":
    main()
