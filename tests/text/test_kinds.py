"""A kind of text is one row, and a test adds one; bytes read and left out are all there are."""

import csv
import io
import json
import re
import tarfile

import pytest

from albert_ds.text.documents import Document, Stream
from albert_ds.text.kinds import KINDS, Kind
from tests.command import run_command
from tests.data.corpus import make_documents
from tests.text.test_tables import pack_table, parquet, pyarrow, shards
from tests.text.test_unpacking import PACKERS, pack_tar


def read_fortunes(stream: Stream):
    """Documents between lines of a percent sign."""
    document = []
    begun = 1
    for line in stream.read_lines():
        if line.text == "%":
            yield Document(document, begun)
            document = []
            begun = line.number + 1
        elif line.text:
            document.append(line.text)
    yield Document(document, begun)


@pytest.fixture
def fortunes():
    kind = Kind(
        "fortunes",
        is_it=lambda head, text_field: head.startswith(b"%\n"),
        read=read_fortunes,
        rest="percent signs and line ends",
        begins=lambda line, after_blank: line == "%",
    )
    KINDS.insert(0, kind)
    yield kind
    KINDS.remove(kind)


def test_a_kind_of_text_is_one_row(tmp_path, vocab, fortunes, monkeypatch):
    """`shards` reads the kind of this test, packed, and cut where the row says, as plain text."""
    texts = ["\n".join(document) for document in make_documents(60)]
    (tmp_path / "plain").write_text("\n\n".join(texts) + "\n")
    content = ("%\n" + "\n%\n".join(texts) + "\n").encode()
    for name in ("fortunes", "fortunes.gz", "cut"):
        (tmp_path / name).write_bytes(PACKERS[".gz"](content) if ".gz" in name else content)
    contents = {}
    for name in ("plain", "fortunes", "fortunes.gz", "cut"):
        monkeypatch.setattr("albert_ds.text.sources.UNIT_BYTES", 999 if name == "cut" else 1 << 20)
        (tmp_path / f"of {name}").mkdir()
        done = shards(tmp_path / f"of {name}", vocab, "--input", tmp_path / name)
        assert done.code == 0, done.err
        assert (f"read: 1 of fortunes, {len(content):,} bytes: " in done.out) == (name != "plain")
        contents[name] = {
            p.name: p.read_bytes() for p in (tmp_path / f"of {name}/out").glob("*.tar")
        }
    assert contents["plain"] == contents["fortunes"] == contents["fortunes.gz"] == contents["cut"]


# Sound texts, and damage of every kind; in each file also what is not text.
TEXTS = ["One line. And more of it.\nAnother line, and more.", "Caf\u00e9 \u4e2d. \U0001f600 here."]
TEXTS += [f"Text number {number}. More of it.\n\nIts end, as it is." for number in range(40)]
SIZE = sum(len(line.encode()) for text in TEXTS for line in text.split("\n"))
PARTS = {
    "plain text": [*(text.replace("\n\n", "\n") for text in TEXTS), "wrong \udcff", "nul \0"],
    "WikiExtractor": [*(f"<doc id=1>\n  {t}\n</doc>" for t in TEXTS), "stray", "<doc>\nunclosed"],
    "JSON lines": [
        *(json.dumps({"id": n, "text": t, "url": "x"}) for n, t in enumerate(TEXTS)),
        *('{"text": "cut', '{"other": 1}', '{"text": "\\ud800"}'),
    ],
}
MISSING = {"CSV": "id, url", "Parquet": "id", "Arrow": "id"}


def make_content(kind: str) -> bytes:
    if kind == "CSV":
        table = io.StringIO(newline="")
        csv.writer(table).writerows([["id", "text", "url"], *(["1", t, "x"] for t in TEXTS)])
        return table.getvalue().encode() + b'1,"a"b,c\n1,2\n'
    if kind in ("Parquet", "Arrow"):
        return pack_table(
            [*TEXTS, None, "nul \0"],
            parquet.write_table if kind == "Parquet" else pyarrow.ipc.new_stream,
        )
    return "\n\n".join([*PARTS[kind], ""]).encode(errors="surrogateescape")


@pytest.mark.parametrize("kind", [*PARTS, "CSV", "Parquet", "Arrow"])
@pytest.mark.parametrize("packing", ["", *PACKERS, ".tar", "cut"])
def test_bytes_read_and_left_out_are_all_there_are(tmp_path, vocab, monkeypatch, kind, packing):
    """The lines at the end of `shards` and `vocab`, by a counter of the test's own."""
    content = make_content(kind)
    size = 0
    is_table = kind in ("Parquet", "Arrow")
    if is_table and packing not in ("", "cut"):
        pytest.skip("a table is not packed")
    size = sum(len((t or "").encode()) for t in [*TEXTS, "nul \0"]) if is_table else len(content)
    if packing == ".tar":
        packed = pack_tar({"a": content, "b": content})
    else:
        packed = PACKERS.get(packing, bytes)(content)
    path = tmp_path / f"corpus{packing}"
    number = 1 + (packing == ".tar")
    path.write_bytes(packed)
    monkeypatch.setattr("albert_ds.text.sources.UNIT_BYTES", 300 if packing == "cut" else 1 << 20)
    words = ("--input", path, "--max-damaged", 0.5, "--any-script")
    for done in (
        shards(tmp_path, vocab, *words),
        run_command("vocab", *words, "--vocab-size", 50, "--output", tmp_path / "v"),
    ):
        assert done.code == 0, done.err
        (line,) = re.findall(f"read: {number} of {kind}, ([0-9,]+) bytes: (.*)", done.out)
        assert int(line[0].replace(",", "")) == number * size
        parts = {
            what: int(count.replace(",", ""))
            for count, what in re.findall("([0-9,]+) of ([^,]+(?:, blanks[^,]+)?)", line[1])
        }
        assert sum(parts.values()) == number * size, line
        assert parts["text"] == number * SIZE and len(parts) > 2
        names = f"not asked for: columns: {MISSING.get(kind, '')}"
        assert (names.replace(",", f" ({number}),") in done.out) == (kind in MISSING)


def test_links_in_a_tar_are_counted(tmp_path, vocab):
    with tarfile.open(tmp_path / "corpus.tar", "w") as tar:
        for name in ("a", "b"):
            content = "\n\n".join(TEXTS).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            member = tarfile.TarInfo("other")
            member.type = kind
            member.linkname = "a"
            tar.addfile(member)
    done = shards(tmp_path, vocab, "--input", tmp_path / "corpus.tar")
    assert done.code == 0 and "read: 2 of plain text" in done.out, done
    assert "left out: links and special files in tars (3)" in done.out
