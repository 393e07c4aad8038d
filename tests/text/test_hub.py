"""Text on the hub, by its real client and a server of our own that answers as the hub does."""

import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.data.corpus import ROOT

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "/datasets/someone/corpus"


class Hub(BaseHTTPRequestHandler):
    """One repository of data sets with a branch, main. `asked` are the ranges of files."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *args, folder: Path, asked: list):
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def describe(self, path: Path) -> dict:
        about = {"path": str(path.relative_to(self.folder)), "oid": "0" * 40, "size": 0}
        if path.is_dir():
            return {"type": "directory", **about}
        return {"type": "file", **about, "size": path.stat().st_size}

    def find(self, name: str) -> dict | list | None:
        """What the hub's interface says of a path of it, as JSON."""
        if name == f"/api{REPOSITORY}/revision/main" or name.endswith(f"/revision/{COMMIT}"):
            return {"id": "someone/corpus", "sha": COMMIT, "siblings": []}
        if match := re.fullmatch(f"/api{REPOSITORY}/tree/{COMMIT}/?(.*)", name):
            folder = self.folder / match[1]
            return [self.describe(p) for p in sorted(folder.iterdir())] if folder.is_dir() else None
        return None

    def answer(self, status: int, content: bytes, **headers):
        self.send_response(status)
        for key, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        name = self.path.partition("?")[0]
        if match := re.fullmatch(f"{REPOSITORY}/resolve/{COMMIT}/(.*)", name):
            content = (self.folder / match[1]).read_bytes()
            about = {"ETag": '"1"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                begin = int(wanted[1])
                end = int(wanted[2]) + 1
                self.asked.append((begin, end))
                about["Content_Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
                self.answer(206, content[begin:end], **about)
            else:
                self.asked.append((0, len(content)))
                self.answer(200, content, **about)
        elif (said := self.find(name)) is not None:
            self.answer(200, json.dumps(said).encode(), Content_Type="application/json")
        else:
            code = "RepoNotFound" if "/someone/" not in name else "RevisionNotFound"
            self.answer(404, b"{}", X_Error_Code=code)

    do_HEAD = do_GET

    def do_POST(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        paths = [self.folder / name for name in wanted]
        entries = [self.describe(path) for path in paths if path.exists()]
        self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """The folder of the repository, the URL of the server and what it was asked for."""
    (tmp_path / "hub" / "data").mkdir(parents=True)
    asked: list[tuple[int, int]] = []
    handler = partial(Hub, folder=tmp_path / "hub", asked=asked)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield tmp_path / "hub", f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def build(tmp_path, hub, vocab, pattern, output="out"):
    vocab.write(tmp_path)
    words = ["shards", "--vocab", tmp_path / "spiece.model", "--output", tmp_path / output]
    words += ["--input", pattern, "--max-unknown", 1, "--any-script", "--holdout", 0]
    return subprocess.run(
        [sys.executable, "-m", "albert_ds", *map(str, words)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub[1],
            "HF_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )


def test_the_commit_of_a_branch_is_kept_and_only_the_text_is_read(tmp_path, hub, vocab):
    texts = [f"Document {number}. It has text. " * 500 for number in range(20)]
    table = pyarrow.table({"text": texts, "html": [os.urandom(200_000) for _ in texts]})
    parquet.write_table(table, hub[0] / "data" / "a.parquet", row_group_size=5)
    (hub[0] / "data" / "b.jsonl").write_text('{"text": "One more. And more."}\n')
    for pattern in ("@main/data/*", "/data"):
        done = build(tmp_path, hub, vocab, f"hf:/{REPOSITORY}{pattern}", pattern.replace("/", "-"))
        assert done.returncode == 0, done.stderr
        index = json.loads((tmp_path / pattern.replace("/", "-") / "index.json").read_text())
        assert index["counts"]["documents"] == 21
        assert index["input"] == [
            {"name": f"hf:/{REPOSITORY}@{COMMIT}/data/{path.name}", "bytes": path.stat().st_size}
            for path in sorted((hub[0] / "data").iterdir())
        ]
        assert sum(end - begin for begin, end in hub[2]) < 3_000_000  # of 4 MB, read three times
        hub[2].clear()


def test_what_is_not_on_the_hub_is_one_line(tmp_path, hub, vocab):
    for pattern in (
        f"hf:/{REPOSITORY}@absent/data/*.parquet",
        "hf://datasets/nobody/nothing@main/*.parquet",
    ):
        done = build(tmp_path, hub, vocab, pattern)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"--input {pattern}: matches no file" in done.stderr
