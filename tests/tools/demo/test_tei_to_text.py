"""Of a TEI novel: headings, paragraphs and verse of the body, a line each, without notes."""

import subprocess
import sys

from tests.conftest import ROOT

NOVEL = """<?xml version="1.0"?>
<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><title>Not text</title></teiHeader><text>
<front><p>Not text.</p></front>
<body><div><head>CHAPTER I</head><p>It was a
 <hi>dark</hi> night<note>Not text.</note>; the rain<pb n="2"/> fell.</p><p/>
<quote><l>A line of verse,</l><l>and another.</l></quote></div></body>
</text></TEI>"""
LINES = ["CHAPTER I", "It was a dark night; the rain fell.", "A line of verse,", "and another."]


def convert(*flags):
    command = [sys.executable, "tools/demo/tei_to_text.py", *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_lines_and_documents(tmp_path):
    for name in ("a.xml", "b.xml"):
        (tmp_path / name).write_text(NOVEL)
    done = convert("--input", tmp_path / "*.xml", "--output", tmp_path / "text")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "text").read_text() == ("\n".join(LINES) + "\n\n") * 2


def test_what_is_not_tei_is_named(tmp_path):
    for name, content, words in (
        ("a.xml", NOVEL[:-20], "a.xml: not XML"),
        ("b.xml", "<html><body><p>Text.</p></body></html>", "b.xml: no TEI text with a body"),
    ):
        (tmp_path / name).write_text(content)
        done = convert("--input", tmp_path / name, "--output", tmp_path / "text")
        assert done.returncode == 3 and words in done.stderr and done.stderr.count("\n") == 1
