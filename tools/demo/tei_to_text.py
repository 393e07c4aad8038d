#!/usr/bin/env python
"""An example of preparing a corpus: TEI novels to plain text, a paragraph a line.

Of each file the body's headings, paragraphs and lines of verse, without notes; a blank line between
files. Then: build_shards.py --input novels.txt.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from albert_ds.cli import Parser, path, run
from albert_ds.data.storage import find_files, open_file
from albert_ds.errors import DamagedData
from albert_ds.files import name_partial, refuse_input

TEI = "{http://www.tei-c.org/ns/1.0}"
LINES = {f"{TEI}{name}" for name in ("head", "p", "l")}
LEFT_OUT = {f"{TEI}{name}" for name in ("note", "gap", "pb")}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add
    add("--input", "TEI files, paths or URLs", "GLOB", path, nargs="+", required=True)
    add("--output", "text file to write", "FILE", Path, required=True)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    files = find_files(args.input)
    refuse_input(args.output, files)
    partial = name_partial(args.output)
    with partial.open("x", encoding="utf-8") as output:
        for location in files:
            for line in read_lines(location):
                output.write(line + "\n")
            output.write("\n")
    partial.replace(args.output)
    print(f"{args.output}: {len(files)} documents, {args.output.stat().st_size / 1e6:.1f} MB")


def read_lines(location: str) -> Iterator[str]:
    """The lines of one file's body."""
    try:
        with open_file(location) as file:
            body = ElementTree.parse(file).getroot().find(f"{TEI}text/{TEI}body")
    except ElementTree.ParseError as error:
        raise DamagedData(f"{location}: not XML: {error}") from None
    if body is None:
        raise DamagedData(f"{location}: no TEI text with a body")
    for element in body.iter():
        if element.tag in LINES:
            line = " ".join("".join(read_text(element)).split())
            if line:
                yield line


def read_text(element: ElementTree.Element) -> Iterator[str]:
    """The text of an element and of all in it, but for what is left out."""
    yield element.text or ""
    for child in element:
        # A line in a line (verse in a paragraph) is a line of its own.
        if child.tag not in LEFT_OUT and child.tag not in LINES:
            yield from read_text(child)
        yield child.tail or ""


if __name__ == "__main__":
    run(main)
