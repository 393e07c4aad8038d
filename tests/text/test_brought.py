"""The table "what you bring, what happens" of docs/data.md: every row is run."""

import json
import os
import re
import tarfile
from pathlib import Path

import pytest

from tests.brought import keep, read_rows
from tests.command import run_command
from tests.text.test_tables import pack_table, parquet, pyarrow
from tests.text.test_unpacking import pack_tar

TEXTS = [f"Text number {number}. More of it, and more." for number in range(30)]
PLAIN = "\n\n".join(TEXTS).encode()
ROWS = "".join(f"1,{text.replace(',', '')},x\n" for text in TEXTS).encode()
STREAM = pack_table(TEXTS, pyarrow.ipc.new_stream)
TABLE = read_rows("data.md", "What you bring, what happens")


def put_link(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a"))
        member = tarfile.TarInfo("b")
        member.type = tarfile.SYMTYPE
        member.linkname = "a"
        tar.addfile(member)


# Of each row: files of the folder IN, or what makes them, and words beside `--input in`.
BROUGHT = {
    "`--input a": ({"a": PLAIN, "b": b"Other text. And more."}, "--input in/a --input in/b"),
    "two tars": ({"a.tar": pack_tar({"a": PLAIN}) + pack_tar({"b": b"Other text."})}, ""),
    "two Arrow streams": ({"a": STREAM + STREAM}, ""),
    "two Parquet or": ({"a": pack_table(TEXTS, parquet.write_table) * 2}, ""),
    "two tables": ({"a": b"id,text,note\n" + ROWS + b"id,text,note\n" + ROWS}, ""),
    "tables put together whose": ({"a": b"id,text,note\n" + ROWS + b"text,id,note\n" + ROWS}, ""),
    "JSON lines with": ({"a": b'{"text": "One.", "text": "Two."}\n' * 30}, ""),
    "a CSV header with blanks": ({"a": b"id, text, note\n" + ROWS}, ""),
    "Excel's line": ({"a": b"sep=;\nid;text;note\n" + ROWS.replace(b",", b";")}, ""),
    "a CSV header without": ({"a": b"id,text,note\n"}, ""),
    "a table without": ({"a": b"id,body,note\n" + ROWS}, ""),
    "text that begins": ({"a": b"{Note}\n" + PLAIN, "b": b"PARENTS\n" + PLAIN}, ""),
    "a JSON array": ({"a": json.dumps([{"text": text} for text in TEXTS]).encode()}, ""),
    "a folder with a broken": (lambda folder: (folder / "b").symlink_to("absent"), ""),
    "a folder with a FIFO": (lambda folder: os.mkfifo(folder / "b"), ""),
    "a folder with hidden": ({"a": PLAIN, ".b": PLAIN}, ""),
    "a tar with links": (put_link, ""),
    "an output in": ({"a": PLAIN}, "--output in/out"),
    "too little": ({"a": PLAIN}, "--vocab-size 5000"),
    "more text than": ({"a": PLAIN * 3}, "--sample-bytes 2000"),
}
TWICE = ("two Arrow streams", "text that begins")


@pytest.mark.parametrize("row", TABLE)
def test_what_you_bring(tmp_path, monkeypatch, row):
    (name,) = [name for name in BROUGHT if row.startswith(name)]
    made, words = BROUGHT[name]
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/text").write_bytes(PLAIN)
    if isinstance(made, dict):
        Path("in/text").unlink()
        for file, content in made.items():
            Path("in", file).write_bytes(content)
    else:
        made(Path("in"))
    given = ["--input", "in", "--output", "out", "--vocab-size", "60", "--any-script"]
    if "--input" in words:
        given = given[2:]
    done = run_command("vocab", *given, *words.split())
    promise = TABLE[row]
    keep(promise, done, code=done.code if "JSON array" in row else None)
    if promise in ("read", "both are read", "read as it stands"):
        sizes = [int(n.replace(",", "")) for n in re.findall("bytes: ([0-9,]+) of te", done.out)]
        expected = sum(map(len, TEXTS)) * (2 if name in TWICE else 1)
        assert sum(sizes) >= expected - 60, done.out


def test_the_table_has_all_rows():
    assert len(TABLE) == len(BROUGHT)
