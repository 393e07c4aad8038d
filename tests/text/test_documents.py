"""Every format gives the same documents; what is damaged is set aside with its reason and place."""

import io
import json

import pytest

from albert_ds.text import documents
from albert_ds.text.documents import (
    Document,
    Stream,
    TextConfig,
    explain_damage,
)
from albert_ds.text.kinds import find_kind
from tests.data.corpus import read_all

DOCUMENTS = [["Title", "First paragraph. It goes on.", "Caf\u00e9 \u4e2d"], ["One line only."]]

WIKI = "".join(
    f'<doc id="{i}" url="x" title="y">\n' + "\n\n".join(lines) + "\n\n</doc>\n"
    for i, lines in enumerate(DOCUMENTS)
)
TEXT = "\n\n" + "\n\n\n".join("\n".join(lines) for lines in DOCUMENTS) + "\n"
JSON = "".join(
    json.dumps({"id": i, "text": "\n\n".join(lines)}) + "\n" for i, lines in enumerate(DOCUMENTS)
)


def split(content: bytes) -> list[Document]:
    kind = find_kind(content, "text", "text")
    return list(kind.read(Stream("text", io.BufferedReader(io.BytesIO(content)), "text")))


@pytest.mark.parametrize("content", [WIKI, TEXT, JSON], ids=["wiki", "text", "json"])
def test_formats(content):
    assert [document.lines for document in split(content.encode())] == DOCUMENTS
    marked = b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode()
    assert [document.lines for document in split(marked)] == DOCUMENTS


def test_empty_documents_are_reported():
    assert [d.lines for d in split(b'<doc id="1">\n\n</doc>\n' + WIKI.encode())] == [[], *DOCUMENTS]
    assert [d.lines for d in split(b'{"text": " "}\n' + JSON.encode())] == [[], *DOCUMENTS]
    assert split(b"\n \n") == []


@pytest.mark.parametrize(
    "content, damage, line",
    [
        (b"fine\n\xff\xfe\n", "wrong_encoding", 1),
        (b"fi\0ne\nfine\n", "nul_bytes", 1),
        (b"fine\n" + b"x" * 999 + b"\nfine\n", "overlong_line", 1),
        (b'<doc id="1">\n\xff\n</doc>\n', "wrong_encoding", 1),
        (b'<doc id="1">\ntext\n', "unclosed_doc", 1),
        (b'{"text": \n', "not_json", 1),
        (b'{"body": "c"}\n', "no_text_field", 1),
        (b'{"text": "c", "text": "d"}\n', "no_text_field", 1),
        (b'{"body": {"text": "c"}}\n', "no_text_field", 1),
        (b'{"text": "\\ud83d"}\n', "wrong_encoding", 1),
        (b'{"text": "\\u0000"}\n', "nul_bytes", 1),
        (b'{"text": "' + b"x" * 999 + b'"}\n', "overlong_line", 1),
    ],
)
def test_a_damaged_document_is_set_aside_and_those_around_it_are_not(
    content, damage, line, monkeypatch
):
    """Between two sound documents of its format, on its own line."""
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 256)
    sound = {b"<": WIKI, b"{": JSON}.get(content[:1], TEXT).encode()
    after = b"\n" + sound
    docs = split(sound + b"\n" + content + after)
    before = (sound + b"\n").count(b"\n")
    (broken,) = [d for d in docs if d.damage]
    assert (broken.damage, broken.line) == (damage, before + line)
    assert [d.lines for d in docs if not d.damage] == DOCUMENTS * 2


def test_a_line_that_is_nested_too_deeply_is_damage_like_any_other():
    deep = b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    docs = split(b'{"text": "One."}\n' + deep + b'\n{"text": "Two."}\n')
    assert [document.damage for document in docs] == ["", "not_json", ""]


@pytest.mark.parametrize(
    "content",
    [
        b'[\n{"text": "One."},\n{"text": "Two."}\n]',
        b'[{"text": "One."}, {"text": "Two."}]',
        b'[\n  {\n    "text": "One."\n  }\n]',
        b'["One.", "Two."]',
        b'[{"text": "One."},\n{"text": "Two."}]',
    ],
)
def test_a_json_array_is_no_prose(content):
    docs = split(content)
    assert docs[0].damage in ("not_json", "no_text_field")
    cause = explain_damage(docs[0].damage, content)
    assert cause == "; it begins like a JSON array: write one object a line (jq -c '.[]' does)"
    assert not split(b"[Music] is playing.\n")[0].damage


@pytest.mark.parametrize(
    "first",
    [
        "{Note} He left.",
        "{{Infobox}} of a town",
        '["Hello," she said.]',
        '{"Quoted" and more}',
        "[1] A note.",
        "[]",
        "[x for x in y]",
        "{",
        "{ a: b }",
        "PARENTS",
        "PAR1 is a magic number",
        "GIF89a is a format",
        "BZh91AY and more",
        "FEA1",
        "%PDF- begins a file",
        "<head of state> he said",
        "ARROW1",
    ],
)
def test_the_first_letters_alone_tell_nothing(first):
    docs = split(f"{first}\nMore of it.\n\nThe end.\n".encode())
    assert [d.lines for d in docs] == [[first, "More of it."], ["The end."]]


def test_json_whose_first_line_is_damaged_is_json():
    for first in ('{"text": "cut off', '{"text": "a" "b"}', '{"id": 1,'):
        docs = split(f"{first}\n{JSON}".encode())
        assert [d.damage for d in docs] == ["not_json", "", ""]


def test_text_outside_of_a_doc_and_a_doc_in_a_doc():
    docs = split(WIKI.encode() + b"stray\nmore\n" + WIKI.encode())
    assert [(d.damage, d.line) for d in docs if d.damage] == [("outside_doc", WIKI.count("\n") + 1)]
    assert [d.lines for d in docs if not d.damage] == DOCUMENTS * 2
    docs = split(b'<doc id="1">\nlost\n<doc id="2">\nkept\n</doc>\n')
    assert [(d.damage, d.line, d.lines) for d in docs] == [
        ("unclosed_doc", 1, []),
        ("", 3, ["kept"]),
    ]


def test_a_record_that_is_no_object_is_damage():
    docs = split(JSON.encode() + b"[1]\n")
    assert docs[-1].damage == "no_text_field"
    for first in (b"null", b"1", b'"text"'):  # a slice of a file may begin with it
        assert explain_damage("no_text_field", first + b"\n" + JSON.encode()) == ""


@pytest.mark.parametrize(("begin", "end"), [(b"", b"\n"), (b"<doc id=1>\n", b"</doc>\n")])
def test_long_text_is_cut_and_says_so(monkeypatch, begin, end):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 20)
    texts = (b"one two\nthree four\nfive six\nseven\n", b"next\n")
    docs = split(b"".join(begin + text + end for text in texts))
    assert [(d.lines, d.cut) for d in docs] == [
        (["one two", "three four"], True),
        (["five six", "seven"], False),
        (["next"], False),
    ]


def test_sentences_of_each_kind_of_line():
    lines = ["Dr. Smith came in 1999. He left", "at once! Why?"]
    assert TextConfig(lines="sentence").split(lines) == lines
    assert TextConfig().split(lines) == [
        "Dr. Smith came in 1999.",
        "He left",
        "at once!",
        "Why?",
    ]
    assert TextConfig(lines="wrapped").split(lines) == [
        "Dr. Smith came in 1999.",
        "He left at once!",
        "Why?",
    ]


def test_blanks_of_any_kind_are_blanks():
    for blank in "\u00a0\u2009\u202f\u3000\u2028\t":
        assert TextConfig().split([f"It was W{blank}.D. Harrigan.{blank}He said so."]) == [
            "It was W .D. Harrigan.",
            "He said so.",
        ]


def test_sentences_are_all_of_the_text(wiki_files):
    lines = [line for document in read_all(wiki_files[:1]) for line in document.lines]
    text = "".join("".join(lines).split())
    assert "".join("".join(TextConfig().split(lines)).split()) == text
