"""The table of docs/languages.md: one row a language, from real text.

    python tools/lab/language_table.py --text ../shared/data > table.md

Reads languages.tar.xz and wiki_sample/ in the folder. Each language gets a vocabulary and shards by
the two commands that a user types, with --language alone, and 2,000 lines are encoded by Hugging
Face's AutoTokenizer as well.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from albert_ds import cli
from albert_ds.data.shards import read_index
from albert_ds.data.vocab import read_vocab
from albert_ds.errors import UserError
from albert_ds.text.documents import split_sentences
from albert_ds.text.languages import SCRIPTS
from albert_ds.text.sources import cut_units, read_documents

TOOLS = Path(__file__).parents[1]
LANGUAGES = ("ar", "de", "en", "ja", "ko", "th", "vi", "zh")
LINES = 2000
HEADER = (
    "language",
    "script",
    "characters changed",
    "words merged",
    "unknown tokens",
    "pieces a word",
    "fill",
    "sequences without a pair",
    "ids equal to Hugging Face",
)


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("--text", required=True, type=Path, metavar="FOLDER", help="holds languages.tar.xz")
    add("--languages", nargs="+", choices=LANGUAGES, default=LANGUAGES, help="rows of the table")
    add("--vocab-size", type=cli.positive, default=6000, metavar="N", help="pieces")
    add(
        "--sequence-length", type=cli.positive, default=128, metavar="TOKENS", help="as in training"
    )
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    print("| " + " | ".join(HEADER) + " |")
    print("| --- | --- |" + " ---: |" * (len(HEADER) - 2), flush=True)
    for code in args.languages:
        with tempfile.TemporaryDirectory() as name:
            row = measure(code, args.text, Path(name), args.vocab_size, args.sequence_length)
        print("| " + " | ".join(row) + " |", flush=True)


def measure(code: str, source: Path, work: Path, vocab_size: int, length: int) -> list[str]:
    """The row of one language, built in the folder `work`."""
    text = unpack(code, source, work)
    size = train(code, text, work / "vocab", vocab_size)
    run(
        *("build_shards.py", "--input", text, "--language", code, "--output", work / "data"),
        *("--vocab", work / "vocab" / "spiece.model", "--sequence-length", length),
    )
    index = read_index(work / "data")
    counts, figures = index["counts"], index["text"]
    sentences = read_sentences(code, text)
    words = sum(len(sentence.split()) for sentence in sentences)
    is_spaced = not {"CJK", "THAI"} & set(SCRIPTS[code][:1])
    pieces = f"{counts['tokens'] / words:.2f}" if is_spaced else "no spaces"
    equal, compared = compare(work / "vocab", sentences)
    return [
        f"{code} ({size:,} pieces)",
        ", ".join(name.title() for name in SCRIPTS[code]).replace("Cjk", "Han"),
        f"{figures['changed_characters'] / figures['characters']:.2%}",
        f"{figures['merged_words'] / figures['words']:.2%}",
        f"{counts['unknown_tokens'] / counts['tokens']:.4%}",
        pieces,
        f"{index['fill']:.1%}",
        f"{counts['one_sentence_sequences'] / counts['sequences']:.1%}",
        f"{equal:,} of {compared:,}",
    ]


def unpack(code: str, source: Path, work: Path) -> str:
    """The text of a language as the value of --input."""
    if code == "en":
        return f"{source}/wiki_sample/*/*"
    path = source / "languages.tar.xz"
    if not path.is_file():
        raise UserError(f"--text {source}: holds no languages.tar.xz")
    with tarfile.open(path, "r:xz") as tar:
        content = tar.extractfile(f"languages/{code}.txt")
        assert content is not None
        (work / "text.txt").write_bytes(content.read())
    return str(work / "text.txt")


def train(code: str, text: str, folder: Path, size: int) -> int:
    """Train a vocabulary of `size` pieces, or of as many as the text can fill; returns how many."""
    flags = ("build_vocab.py", "--input", text, "--language", code, "--output", folder)
    try:
        run(*flags, "--vocab-size", size)
    except UserError as error:
        limit = re.search(r"yields at most (\d+) pieces", str(error))
        if limit is None:
            raise
        size = int(limit[1])
        run(*flags, "--vocab-size", size)
    return size


def run(tool: str, *flags: object) -> None:
    done = subprocess.run(
        [sys.executable, TOOLS / tool, *map(str, flags)], capture_output=True, text=True
    )
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode:
        raise UserError(f"{tool} ended with {done.returncode}: {done.stderr}")


def read_sentences(code: str, text: str) -> list[str]:
    from albert_ds.data.storage import find_files

    slices = [piece for unit in cut_units(find_files([text])) for piece in unit]
    documents = (reading.document for reading in read_documents(slices))
    return [s for d in documents for s in split_sentences(d.lines, "paragraph", code)]


def compare(folder: Path, sentences: list[str]) -> tuple[int, int]:
    """(lines with the ids of Hugging Face, lines compared)."""
    from transformers import AutoTokenizer

    lines = sentences[:: max(1, len(sentences) // LINES)][:LINES]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    theirs = tokenizer(lines, add_special_tokens=False)["input_ids"]
    ours = read_vocab(folder / "spiece.model").encode(lines)
    return sum(a == b for a, b in zip(ours, theirs, strict=True)), len(lines)


if __name__ == "__main__":
    cli.run(main)
