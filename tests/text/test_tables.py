"""Tables of every kind give the documents that the same text gives; what is no text is refused."""

import csv
import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from albert_ds.base.errors import UserError
from albert_ds.base.storage import find_files
from albert_ds.text import documents, sources
from albert_ds.text.sources import cut_units, read_documents
from albert_ds.text.tables import ARROW_END
from tests.command import run_command
from tests.data.corpus import ROOT, make_documents, read_all, write_wiki
from tests.text.test_documents import DOCUMENTS, JSON
from tests.text.test_pool import build as build_apart

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SAVED = ROOT / "tests" / "fixtures" / "saved_dataset"  # by `save_to_disk` of datasets 5.2
TEXTS = ["\n\n".join(lines) for lines in DOCUMENTS]


def write_csv(path: Path, rows, **options) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows(rows)
    return path


def write_parquet(path: Path, texts, rows=2, column="text", **options) -> Path:
    table = pyarrow.table({"id": range(len(texts)), column: texts})
    parquet.write_table(table, path, row_group_size=rows, **options)
    return path


def lines_of(path, **options) -> list[list[str]]:
    return [document.lines for document in read_all([path], **options)]


def shards(tmp_path, vocab, *words):
    """The command over small documents, and what it built."""
    vocab.write(tmp_path)
    words = ("--vocab", tmp_path / "spiece.model", "--max-unknown", 1, *words)
    return run_command("shards", "--output", tmp_path / "out", "--any-script", *words)


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
@pytest.mark.parametrize(("suffix", "end"), [("", b"\r\n"), (".gz", b"\n"), ("", b"\r")])
def test_csv_of_any_delimiter(tmp_path, delimiter, suffix, end):
    rows = [["id", "text", "note"], *([n, text, 'a "b", c;'] for n, text in enumerate(TEXTS))]
    path = write_csv(tmp_path / "corpus", rows, delimiter=delimiter)
    content = b"\xef\xbb\xbf" + path.read_bytes().replace(b"\r\n", end)
    path = tmp_path / f"packed{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert lines_of(path) == DOCUMENTS


@pytest.mark.parametrize(
    "text",
    [
        'id, text, note\n1, One. Two., x\n2, "Three, four.", y\n',
        'id ,text ,note\n1,One. Two.,x\n2,"Three, four.",y\n',
        '"id", "text"\n1, "One. Two."\n2, "Three, four."\n',
        'id; text\n1; One. Two.\n2; "Three, four."\n',
        'sep=;\nid;text\n1;One. Two.\n2;"Three, four."\n',
        'sep=,\r\ntext\r\nOne. Two.\r\n"Three, four."\r\n',
        "\ufeffsep=:\ntext:id\nOne. Two.:1\nThree, four.:2\n",
        'PARENT_ID,text\n1,One. Two.\n2,"Three, four."\n',
    ],
)
def test_headers_of_every_hand_are_headers(tmp_path, text):
    (tmp_path / "corpus").write_text(text, encoding="utf-8")
    assert lines_of(tmp_path / "corpus") == [["One. Two."], ["Three, four."]]
    (tmp_path / "corpus").write_text(text.replace("text", "body"), encoding="utf-8")
    if not re.match('"?id"? ?[,;] ?"?text', text):
        with pytest.raises(UserError, match="has no column 'text'; it has .*body"):
            read_all([tmp_path / "corpus"])


@pytest.mark.parametrize("header", ["id,text,note", "id, text, note", " text ,id", '"id", "text"'])
def test_a_header_alone_is_a_table_without_rows(tmp_path, vocab, header):
    (tmp_path / "csv").write_text(f"{header}\n")
    assert read_all([tmp_path / "csv"]) == []
    assert shards(tmp_path, vocab, "--input", tmp_path / "csv").code == 2


def test_tables_put_together_keep_their_rows_apart_from_their_headers(tmp_path):
    for end in ("", "\ufeff"):  # as Excel writes each
        text = f"{end}id,text\n1,One.\n{end}id , text\n2,Two.\n2,text\n"
        (tmp_path / "csv").write_text(text, encoding="utf-8")
        assert lines_of(tmp_path / "csv") == [["One."], ["Two."], ["text"]]
    (tmp_path / "csv").write_text("id,text\n1,One.\ntext,id\nTwo.,2\n")
    with pytest.raises(UserError, match="csv: line 3 has the names of .* in another order"):
        read_all([tmp_path / "csv"])


def test_csv_of_one_column(tmp_path):
    path = write_csv(tmp_path / "corpus", [["text"], *([text] for text in TEXTS)])
    assert lines_of(path) == DOCUMENTS


@pytest.mark.parametrize(
    "text",
    [
        "Yes, he said.\nNo, she said.\nWell, well.\n",
        "One; two.\nThree; four.\n\nFive; six.\nSeven; eight.\n",
        "Only,one,line\n",
        '"Hello," she said.\n"Well," he said.\n',
        "Text, by its authors\nMore text, of others\n",
        "Images, text, and sound.\n",
        "Images, text, and sound.\nAnd more, of them, every day.\n",
    ],
)
def test_prose_with_commas_is_no_table(tmp_path, text):
    (tmp_path / "prose").write_text(text)
    lines = [line for document in read_all([tmp_path / "prose"]) for line in document.lines]
    assert lines == [line for line in text.split("\n") if line]


def test_broken_rows_are_damage_at_their_line(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 256)
    rows = 'id,text\n1,"One.\nTwo."\n2,"a" b\n3,a,b\n\n4,\xff\n5,Five.\n'
    rows += "6," + 999 * "x" + '\n7,Seven.\n8,"never\nclosed\n9,again\n'
    (tmp_path / "csv").write_bytes(rows.encode("latin-1"))
    outcomes = [(d.lines, d.damage, d.line) for d in read_all([tmp_path / "csv"])]
    assert outcomes == [
        (["One.", "Two."], "", 2),
        ([], "broken_row", 4),
        ([], "broken_row", 5),
        ([], "wrong_encoding", 7),
        (["Five."], "", 8),
        ([], "overlong_line", 9),
        (["Seven."], "", 10),
        *(([], "broken_row", line) for line in (11, 12, 13)),  # each may have been a row
    ]


@pytest.mark.parametrize(
    "values",
    [
        pyarrow.array(TEXTS),
        pyarrow.array(TEXTS, pyarrow.large_string()),
        pyarrow.array(TEXTS, pyarrow.string_view()),
        pyarrow.array(TEXTS).dictionary_encode(),
    ],
    ids=lambda values: str(values.type)[:12],
)
def test_text_of_any_type_of_parquet_and_arrow(tmp_path, values):
    table = pyarrow.table({"meta": [{"text": 1}] * len(TEXTS), "text": values})
    with pyarrow.ipc.new_stream(tmp_path / "stream", table.schema) as writer:
        writer.write(table)
    with pyarrow.ipc.new_file(tmp_path / "file", table.schema) as writer:
        writer.write(table)
    assert lines_of(tmp_path / "stream") == lines_of(tmp_path / "file") == DOCUMENTS
    parquet.write_table(table, tmp_path / "parquet")
    assert lines_of(tmp_path / "parquet") == DOCUMENTS


def pack_table(texts, write) -> bytes:
    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    packed = io.BytesIO()
    if write is parquet.write_table:
        write(table, packed, row_group_size=7)
        return packed.getvalue()
    with write(packed, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return packed.getvalue()


@pytest.mark.parametrize("sizes", [(20, 20), (3, 40), (40, 3), (1, 1), (9, 9, 9)])
def test_tables_put_together_are_read_to_the_last_or_refused(tmp_path, vocab, sizes):
    """As `cat` does it: no part goes missing. Of streams of Arrow, all are read."""
    parts = [[f"Text {n} of {size}. More of it." for n in range(size)] for size in sizes]
    for write, name in ((pyarrow.ipc.new_file, "Arrow"), (parquet.write_table, "Parquet")):
        path = tmp_path / f"{name} {len(sizes)}"
        path.write_bytes(b"".join(pack_table(texts, write) for texts in parts))
        done = shards(tmp_path, vocab, "--input", path)
        assert done.code == 2 and not (tmp_path / "out/index.json").exists(), done
        assert f"{path}: is several {name} files, one behind the other" in done.err
        path.write_bytes(pack_table(parts[0], write))  # alone it is read
        assert lines_of(path) == [[text] for text in parts[0]]
    streams = [pack_table(texts, pyarrow.ipc.new_stream) for texts in parts]
    (tmp_path / "streams").write_bytes(b"".join(streams))
    assert lines_of(tmp_path / "streams") == [[text] for texts in parts for text in texts]


def test_a_row_that_is_not_utf_8_is_damage_by_itself(tmp_path):
    values = pyarrow.array([b"One.", b"\xff", b"T\0wo", b"Three."]).view(pyarrow.string())
    table = pyarrow.table({"text": values})
    with pyarrow.ipc.new_stream(tmp_path / "arrow", table.schema) as writer:
        writer.write(table)
    parquet.write_table(table, tmp_path / "parquet")
    for path in (tmp_path / "arrow", tmp_path / "parquet"):
        damage = [(d.damage, d.line) for d in read_all([path])]
        assert damage == [("", 1), ("wrong_encoding", 2), ("nul_bytes", 3), ("", 4)]


def test_every_cut_of_parquet_gives_the_same_rows(tmp_path):
    texts = [f"Document {number}. " * (1 + number % 7) for number in range(40)]
    path = write_parquet(tmp_path / "corpus", texts, rows=3)
    for unit_bytes in (1, 100, 500, 1 << 20):
        documents = read_all([path], unit_bytes)
        assert [document.lines for document in documents] == [[text.strip()] for text in texts]
        assert [document.line for document in documents] == list(range(1, 41))
    assert len({len(cut_small([path], size)) for size in (1, 500, 1 << 20)}) == 3


def cut_small(paths, unit_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "UNIT_BYTES", unit_bytes)
        return cut_units(map(str, paths))


def test_a_saved_dataset_is_read_as_its_state_says(tmp_path):
    folder = Path(shutil.copytree(SAVED, tmp_path / "saved" / "train"))
    shutil.copy(folder / "data-00001-of-00002.arrow", folder / "cache-1234.arrow")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    expected = [str(folder / f"data-0000{n}-of-00002.arrow") for n in range(2)]
    for pattern in (tmp_path / "saved", folder, f"{folder}/*"):
        assert find_files([str(pattern)]) == expected
    docs = read_all([Path(path) for path in expected])
    assert [(d.lines, d.damage) for d in docs] == [
        (["One. Two.", "Three."], ""),
        ([], "no_text_field"),
        (["Caf\u00e9."], ""),
    ]


def test_every_kind_gives_the_same_shards(tmp_path, vocab):
    """By one process, or by two of which one was killed; the index tells the files apart."""
    vocab.write(tmp_path)
    documents = make_documents(80)
    texts = [" ".join(document) for document in documents]
    rows = [["text", "label"], *([text, "x"] for text in texts)]
    paths = {
        "jsonl": tmp_path / "jsonl",
        "csv": write_csv(tmp_path / "csv", rows),
        "parquet": write_parquet(tmp_path / "parquet", texts, rows=7),
    }
    paths["jsonl"].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ["--vocab", tmp_path / "spiece.model", "--sequence-length", 64, "--holdout", 0.1]
    flags += ["--samples-per-shard", 16, "--max-unknown", 1]
    for name, path in paths.items():
        done = run_command("shards", "--input", path, "--output", tmp_path / f"of-{name}", *flags)
        assert done.code == 0, done.err
    words = (tmp_path / "of-killed", [*flags, "--input", paths["parquet"]])
    build_apart(*words, code=-9, KILL_AFTER="2")
    assert "2 pieces of work were kept" in build_apart(*words, "--processes", 2)[1]
    contents = {}
    for name in (*paths, "killed"):
        folder = tmp_path / f"of-{name}"
        index = json.loads((folder / "index.json").read_text())
        path = paths.get(name, paths["parquet"])
        assert index.pop("input") == [{"name": path.name, "bytes": path.stat().st_size}]
        contents[name] = index, {p.name: p.read_bytes() for p in folder.glob("*.tar")}
    assert all(content == contents["jsonl"] for content in contents.values())


def test_parquet_behind_a_url_is_read_by_parts(tmp_path, monkeypatch):
    texts = [f"Document {number}. " * 2000 for number in range(60)]
    path = write_parquet(tmp_path / "corpus", texts, rows=10, compression="none")
    files = fsspec.filesystem("memory")
    files.pipe("/tables/a.parquet", path.read_bytes())
    monkeypatch.setattr(
        type(files), "get_file", lambda *_, **__: pytest.fail("the whole file was copied")
    )
    (unit,) = cut_units(find_files(["memory://tables"]))
    assert [r.document.lines for r in read_documents(unit)] == [[text.strip()] for text in texts]


PEAK = r"""
import re, sys
import pyarrow.parquet
from albert_ds.text.sources import cut_units, read_documents

def peak():  # ru_maxrss is at least that of the process that started this one
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) << 10

before, size = peak(), 0
for unit in cut_units(sys.argv[1:]):
    for reading in read_documents(unit):
        size += sum(map(len, reading.document.lines))
print(size, peak() - before)
"""


@pytest.mark.nightly
def test_memory_is_bounded_by_neither_the_file_nor_its_row_groups(tmp_path):
    """300 MB in one row group, as pandas writes it, take less than 80 MB."""
    draw = random.Random(0)
    letters = "".join(draw.choices("abcdefgh ", k=1 << 20))
    starts = [draw.randrange(len(letters) - 3000) for _ in range(100_000)]
    texts = [f"{number}{letters[start : start + 3000]}" for number, start in enumerate(starts)]
    path = write_parquet(tmp_path / "corpus", texts, rows=1 << 20)
    assert parquet.ParquetFile(path).num_row_groups == 1 and path.stat().st_size > 200 << 20
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    size, peak = map(int, done.stdout.split())
    assert size > 295_000_000 and peak < 80 << 20


BINARY = bytes(range(256)) * 300
REFUSED = {
    "png": (b"\x89PNG\r\n\x1a\n" + BINARY, "looks like a picture"),
    "pdf": (b"%PDF-1.7\n" + BINARY, "looks like a PDF: take its text out"),
    "docx": (b"PK\x03\x04" + BINARY, "looks like a zip, as .docx, .xlsx"),
    "html": (b"<!DOCTYPE html>\n<p>Text.</p>\n", "looks like HTML: take its text out"),
    "bom": (b"\xef\xbb\xbf<!DOCTYPE html>\n<p>Text.</p>\n", "looks like HTML: take its text out"),
    "dump": (b"<mediawiki xmlns=\"x\">\n", "looks like XML: take its text out (of Wikipedia's"),
    "packed": (gzip.compress(TEXTS[0].encode()), "looks like gzip: let its name end in .gz"),
    "binary": (BINARY, "looks like binary data, not text"),
    "wrong.csv": (b"id,body,url\n1,Some text.,x\n2,More.,y\n", "has no column 'text'; it has id"),
    "twice.csv": (b"text,text\na,x\nb,y\n", "has 2 columns 'text'; it has text, text; "),
    "mac.txt": (b"Some text.\rMore.\r", "its lines end in CR alone: convert it with tr"),
    "mac.jsonl": (b'{"text": "a"}\r{"text": "b"}\r', "its lines end in CR alone"),
    "semi.csv": (b"id;body\n1;Some text.\n2;More.\n", "has no column 'text'; it has id, body;"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_no_text_is_refused_before_anything_is_written(tmp_path, vocab, name, packed):
    content, message = REFUSED[name]
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content) if packed else content)
    done = shards(tmp_path, vocab, "--input", path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"{path}: {message}" in done.err
    assert not (tmp_path / "out").exists()
    done = run_command("vocab", "--input", path, "--output", tmp_path / "vocabulary")
    assert done.code == 2 and f"{path}: {message}" in done.err


def corrupt(path: Path, group: int) -> Path:
    """Spoil the pages of text of a row group."""
    about = parquet.ParquetFile(path).metadata.row_group(group).column(1)
    content = bytearray(path.read_bytes())
    begin = about.dictionary_page_offset or about.data_page_offset
    content[begin : begin + about.total_compressed_size] = b"\xff" * about.total_compressed_size
    path.write_bytes(content)
    return path


def list_broken(folder: Path):
    texts = [f"Text of document {n}." for n in range(9)]
    yield (
        write_parquet(folder / "a", texts, column="body"),
        2,
        "has no column 'text'; it has id, bo",
    )
    parquet.write_table(pyarrow.table({"text": [1, 2]}), folder / "b")
    yield folder / "b", 2, "b: column 'text' holds int64, not text"
    yield corrupt(write_parquet(folder / "c", texts), 3), 3, "c: row group 3: cannot be read: "
    whole = write_parquet(folder / "d", texts).read_bytes()
    (folder / "d").write_bytes(whole[:-50])
    yield folder / "d", 3, "d: not a whole Parquet file: "
    (folder / "e.gz").write_bytes(gzip.compress(whole))
    yield folder / "e.gz", 2, "e.gz: Parquet in a packed file: unpack it"
    yield (
        write_parquet(folder / "f", [*texts, None, None]),
        2,
        "f: row 10: no text in 'text' (2 of t",
    )
    yield write_parquet(folder / "g", [*texts * 5, None]), 3, "no_text_field first at "
    saved = (SAVED / "data-00000-of-00002.arrow").read_bytes()
    (folder / "h").write_bytes(saved[:-8])
    yield folder / "h", 3, "h: the Arrow file is cut short"
    (folder / "i").write_bytes(saved[:200] + saved[-8:])
    yield folder / "i", 3, "i: cannot be read: "
    with pyarrow.ipc.new_file(folder / "l", pyarrow.schema({"text": "string"})) as writer:
        writer.write(pyarrow.table({"text": texts}))
    (folder / "l").write_bytes((folder / "l").read_bytes().partition(ARROW_END)[0])
    yield folder / "l", 3, "l: the Arrow file is cut short"
    (folder / "j").write_text(JSON.replace('"text"', '"body"'))
    yield folder / "j", 2, "j: line 1: no text in 'text'; the first line has id, body; --text-field"
    (folder / "k").write_text("id,text\n" + "1,Text.\n" * 9 + '2,"a" b\n')
    yield folder / "k", 3, "broken_row first at "


def test_broken_tables_are_one_line_that_says_what_is_wrong(tmp_path, vocab):
    for path, code, message in list_broken(tmp_path):
        done = shards(tmp_path, vocab, "--input", path)
        assert (done.code, done.err.count("\n")) == (code, 1), (path, done.err)
        assert message in done.err
        assert not (tmp_path / "out" / "index.json").exists()


def test_null_texts_are_counted_where_the_user_allows_them(tmp_path, vocab):
    path = write_parquet(tmp_path / "f", ["Text. More text.", "Other text. More.", None, None])
    done = shards(tmp_path, vocab, "--input", path, "--max-damaged", 0.5)
    assert done.code == 0, done.err
    counts = json.loads((tmp_path / "out" / "index.json").read_text())["counts"]
    assert counts["damaged_no_text_field"] == 2 == counts["documents"]
    assert f"no_text_field: 2 dropped, first: {path}: row 3" in done.out


def test_a_named_column_and_the_kinds_of_files_are_told(tmp_path, vocab):
    write_parquet(tmp_path / "a.parquet", TEXTS, column="content")
    write_csv(tmp_path / "b.csv", [["id", "content"], [1, "Text of a table. More of it."]])
    (tmp_path / "c.jsonl").write_text('{"content": "Text of JSON. More of it."}\n')
    words = ("--input", tmp_path / "[abc].*", "--text-field", "content")
    done = run_command(
        "vocab", *words, "--any-script", "--output", tmp_path / "v", "--vocab-size", 40
    )
    assert done.code == 0, done.err
    for kind in ("Parquet", "CSV", "JSON lines"):
        assert f"read: 1 of {kind}, " in done.out
    done = shards(tmp_path, vocab, *words)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out" / "index.json").read_text())["counts"]["documents"] == 4


@pytest.mark.parametrize(
    "location, package, extra",
    [
        ("hf://datasets/someone/corpus@v1/data/*.parquet", "huggingface_hub", "hf"),
        ("a.parquet", "pyarrow", "parquet"),
    ],
)
def test_a_missing_extra_is_one_line(tmp_path, vocab, monkeypatch, location, package, extra):
    from importlib import util

    write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.chdir(tmp_path)
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == package else real(name))
    done = shards(tmp_path, vocab, "--input", location)
    assert done.code == 2
    line = f"{location}: the package {package} is not installed; pip install 'albert-ds[{extra}]'\n"
    assert done.err.endswith(line)


def test_one_document_and_a_small_held_out_set_are_warned_of(tmp_path, vocab):
    path = tmp_path / "text"
    path.write_text("One sentence. Another one.\nA third.\n")
    done = shards(tmp_path, vocab, "--input", path)
    assert "warning: the text is one document, so nothing is held out; leave a blank" in done.err
    (tmp_path / "more").mkdir()
    write_wiki(tmp_path / "more" / "text", make_documents(120))
    done = shards(tmp_path / "more", vocab, "--input", tmp_path / "more" / "text")
    heldout = json.loads((tmp_path / "more/out/index.json").read_text())["splits"]["heldout"]
    assert (
        f"{heldout['tokens']:,} tokens in {heldout['documents']} documents are held o" in done.err
    )
    share = float(done.err.split("--holdout ")[1].split()[0])
    shutil.rmtree(tmp_path / "more" / "out")
    words = ("--input", tmp_path / "more" / "text", "--holdout")
    assert "are held out" not in shards(tmp_path / "more", vocab, *words, min(0.5, share + 0.1)).err
