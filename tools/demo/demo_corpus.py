"""Write a corpus of English prose that every Python installation carries.

    python tools/demo/demo_corpus.py --output demo/corpus.txt

The interpreter's reference texts, then the docstrings of the standard library and of the installed
packages, read from their sources without importing any. Only sentences are kept: no signatures,
examples, tables or lists of parameters, and nothing twice. A document is a text or a module; a line
is a paragraph; a blank line ends a document. The same installation gives the same bytes.
"""

import ast
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from albert_ds.base.cli import Parser, run

MIN_WORDS = 6  # of a sentence
MIN_SENTENCES = 3  # of a document
MAX_SYMBOLS = 0.06  # share of characters that neither prose nor its punctuation has
SKIPPED_FOLDERS = {
    *("test", "tests", "testing", "idle_test", "_vendor", "site-packages", "dist-packages")
}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

MARKUP = (  # reStructuredText and Markdown -> the words that they mark
    (re.compile(r":[a-z:]+:`~?([^`<]+?)(?: <[^`>]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]+) <[^`>]*>`_+"), r"\1"),
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),
    (re.compile(r"`+([^`]+)`+_*"), r"\1"),
    (re.compile(r"(?<!\w)\*{1,2}([^*\s][^*]*?)\*{1,2}(?!\w)"), r"\1"),
    (re.compile(r"\s+"), " "),
)
SENTENCE_END = re.compile(
    r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!eg\.)(?<!vs\.) (?=[A-Z\"'(])"
)
SENTENCE = re.compile(r"[A-Z\"'(].*[.?!][\"')]*")
CODE = re.compile(r"https?:|::|->|==|\(\)|\\|[{}<>|=#@$^~]|\w\(|__|\w\.\w+\.\w")
SYMBOL = re.compile(r"[^A-Za-z ,.;:'\"()?!-]")


def read_topics() -> Iterator[list[str]]:
    """The paragraphs of each of the interpreter's reference texts, those of help()."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield split_paragraphs(cleandoc(topics[name]))


def read_modules(root: Path, counts: Counter) -> Iterator[list[str]]:
    """The paragraphs of all docstrings of each module below `root`, by path."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes in others' strings
                module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates, sources of another Python
            counts["modules that do not parse"] += 1
            continue
        yield [
            paragraph for text in read_docstrings(module) for paragraph in split_paragraphs(text)
        ]


def read_docstrings(node: Documented) -> Iterator[str]:
    """The docstrings of a module and of the classes and functions in it, in order."""
    yield ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, Documented):
            yield from read_docstrings(child)


def split_paragraphs(text: str) -> list[str]:
    """The unindented paragraphs of a text; what is indented is code, a list or a table."""
    blocks = re.split(r"\n\s*\n", text)
    return [
        block for block in blocks if block and not re.search(r"^(\s|>>>|[-=|+*.]{2})", block, re.M)
    ]


def clean(paragraph: str) -> list[str]:
    """The sentences of a paragraph, without markup; none where it is not prose."""
    for pattern, words in MARKUP:
        paragraph = pattern.sub(words, paragraph.strip())
    return [sentence for sentence in SENTENCE_END.split(paragraph) if is_prose(sentence)]


def is_prose(sentence: str) -> bool:
    """Whether this is a whole sentence of words, with hardly a symbol."""
    return (
        SENTENCE.fullmatch(sentence) is not None
        and len(sentence.split()) >= MIN_WORDS
        and CODE.search(sentence) is None
        and len(SYMBOL.findall(sentence)) <= MAX_SYMBOLS * len(sentence)
    )


def clean_documents(documents: Iterator[list[str]], counts: Counter) -> Iterator[str]:
    """Each document as its paragraphs' new sentences, a line a paragraph."""
    seen: set[str] = set()
    for paragraphs in documents:
        lines = []
        kept = 0
        for paragraph in paragraphs:
            sentences = [s for s in clean(paragraph) if s not in seen]
            seen.update(sentences)
            kept += len(sentences)
            if sentences:
                lines.append(" ".join(sentences))
        if kept < MIN_SENTENCES:
            counts["documents too short"] += 1
            continue
        counts["sentences"] += kept
        yield "\n".join(lines) + "\n"


def write_corpus(output: Path, max_bytes: int) -> Counter:
    """Write documents until the next would exceed `max_bytes`; returns what was counted."""
    counts: Counter = Counter()
    paths = sysconfig.get_paths()

    def read_all() -> Iterator[list[str]]:
        yield from read_topics()
        for root in dict.fromkeys(paths[key] for key in ("stdlib", "purelib", "platlib")):
            yield from read_modules(Path(root), counts)

    with output.open("w", encoding="utf-8", newline="\n") as file:
        for document in clean_documents(read_all(), counts):
            size = len(document.encode()) + 1
            if counts["bytes"] + size > max_bytes:
                break
            file.write(document + "\n")
            counts["bytes"] += size
            counts["documents"] += 1
    return counts


def main(argv: list[str]) -> None:
    parser = Parser(prog="tools/demo/demo_corpus.py", description=__doc__.splitlines()[0])
    add = parser.add
    add("--output", "text file to write", "FILE", Path, required=True)
    add("--max-bytes", "size, at most", "BYTES", int, default=2_000_000)
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    counts = write_corpus(args.output, args.max_bytes)
    print(f"{args.output}: " + ", ".join(f"{n:,} {what}" for what, n in counts.items()))


if __name__ == "__main__":
    run(main)
