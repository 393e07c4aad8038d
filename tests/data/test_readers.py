"""Every format and packing gives the same documents; what is missing or damaged is named."""

import gzip
import json

import pytest
import zstandard

from albert_ds.data.readers import find_inputs, read_documents, split_sentences
from albert_ds.errors import DamagedData, UserError

DOCUMENTS = [["Title", "First paragraph. It goes on.", "Caf\u00e9 \u4e2d"], ["One line only."]]

WIKI = "".join(
    f'<doc id="{i}" url="x" title="y">\n' + "\n\n".join(lines) + "\n\n</doc>\n"
    for i, lines in enumerate(DOCUMENTS)
)
TEXT = "\n\n" + "\n\n\n".join("\n".join(lines) for lines in DOCUMENTS) + "\n"
JSON = "".join(
    json.dumps({"id": i, "text": "\n\n".join(lines)}) + "\n" for i, lines in enumerate(DOCUMENTS)
)
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def read(path):
    return [document.lines for document in read_documents([path])]


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("content", [WIKI, TEXT, JSON], ids=["wiki", "text", "json"])
def test_formats_and_packings(tmp_path, content, suffix):
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(PACKERS[suffix](content.encode()))
    assert read(path) == DOCUMENTS


def test_several_frames_windows_ends_and_mark(tmp_path):
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"corpus{suffix}"
        path.write_bytes(b"".join(PACKERS[suffix](doc.encode()) for doc in (TEXT, "\n\nMore.\n")))
        assert read(path) == [*DOCUMENTS, ["More."]]
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert read(path) == DOCUMENTS


def test_empty_documents_are_reported(tmp_path):
    path = tmp_path / "wiki"
    path.write_text('<doc id="1">\n\n</doc>\n' + WIKI)
    assert read(path) == [[], *DOCUMENTS]
    path.write_text('{"text": " "}\n' + JSON)
    assert read(path) == [[], *DOCUMENTS]
    path.write_text("\n \n")
    assert read(path) == []


def test_progress_reaches_the_size_of_the_files(tmp_path):
    paths = [tmp_path / "a.gz", tmp_path / "b"]
    for path in paths:
        path.write_bytes(PACKERS[path.suffix](WIKI.encode()))
    positions = [document.bytes_read for document in read_documents(paths)]
    assert positions == sorted(positions)
    assert positions[-1] == sum(path.stat().st_size for path in paths)


def test_find_inputs(tmp_path):
    for name in ("AA/wiki_01", "AA/wiki_00", "AB/wiki_00"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    everything = [tmp_path / name for name in ("AA/wiki_00", "AA/wiki_01", "AB/wiki_00")]
    assert find_inputs([f"{tmp_path}/A?/*"]) == everything
    assert find_inputs([f"{tmp_path}/**", f"{tmp_path}/AA/wiki_00"]) == everything
    (tmp_path / "odd[1].txt").touch()
    assert find_inputs([f"{tmp_path}/odd[1].txt"]) == [tmp_path / "odd[1].txt"]
    with pytest.raises(UserError, match=r"--input .*/AC/\*: matches no file$"):
        find_inputs([f"{tmp_path}/A?/*", f"{tmp_path}/AC/*"])
    with pytest.raises(
        UserError, match=r"matches no file; for the files in this folder: '.*/\*\*'"
    ):
        find_inputs([str(tmp_path)])


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("a", b"fine\n\xff\xfe\n", "a: line 2 is not UTF-8"),
        ("a", b'<doc id="1">\ntext\n', "a: the <doc> of line 1 is never closed"),
        ("a", b'<doc id="1">\n<doc id="2">\n</doc>\n', "a: the <doc> of line 1 is never closed"),
        ("a", b'<doc id="1">\n</doc>\nstray\n', "a: line 3 lies outside <doc> ... </doc>: stray"),
        ("a", b'{"text": "b"}\n{"text": \n', "a: line 2 is not JSON"),
        ("a", b'{"text": "b"}\n{"body": "c"}\n', 'a: line 2 has no text under "text"'),
        ("a", b'{"text": "\\ud83d"}\n', "a: line 1 is not Unicode: half of a surrogate pair"),
        ("a.gz", gzip.compress(WIKI.encode())[:-20], "a.gz: cannot be read after line"),
        ("a.gz", b"not packed at all", "a.gz: cannot be read after line 0"),
        ("a.zst", PACKERS[".zst"](WIKI.encode() * 99)[:-5], "a.zst: cannot be read after line"),
        ("a.zst", b"not packed at all", "a.zst: cannot be read after line 0"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedData) as error:
        read(tmp_path / name)
    assert str(error.value).startswith(f"{tmp_path}/{complaint}")
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="absent: cannot be opened: No such file"):
        read(tmp_path / "absent")


def test_sentences_of_each_kind_of_line():
    lines = ["Dr. Smith came in 1999. He left", "at once! Why?"]
    assert split_sentences(lines, "sentence") == lines
    assert split_sentences(lines, "paragraph") == [
        "Dr. Smith came in 1999.",
        "He left",
        "at once!",
        "Why?",
    ]
    assert split_sentences(lines, "wrapped") == [
        "Dr. Smith came in 1999.",
        "He left at once!",
        "Why?",
    ]


def test_sentences_are_all_of_the_text(wiki_files):
    lines = [line for document in read_documents(wiki_files[:1]) for line in document.lines]
    text = "".join("".join(lines).split())
    assert "".join("".join(split_sentences(lines, "paragraph")).split()) == text
