"""A small Hugging Face Hub on this machine: it answers what a push asks.

A branch is a list of commits, each with all its files. Files of weights are sent by their sha256
(Git LFS, not Xet), others within the commit. `requests` holds the (method, path) of all that was
asked; a request whose path has a part in `fails` is answered with that error, once.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub import ModelCardData

TOKEN = "hf_of_the_test"
LARGE = (".safetensors", ".model")  # ends of the names that the Hub's .gitattributes lists


class Hub(ThreadingHTTPServer):
    """The server's state. A branch is its commits, oldest first; a commit is path -> content."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, list[dict[str, bytes]]]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fails: dict[str, int] = {}  # part of a path -> status

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def download(self, repo: str, revision: str, folder: Path) -> Path:
        """Write the newest commit of a branch to a folder."""
        for name, content in self.repos[repo][revision][-1].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


@contextmanager
def serve():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def find_faults(card: str) -> list[str]:
    """What the Hub would not take of a card's metadata."""
    found = re.match(r"---\n(.*?)\n---\n", card, re.S)
    metadata = yaml.safe_load(found[1]) if found else None
    if not isinstance(metadata, dict):
        return ["no metadata"]
    try:
        data = ModelCardData(**metadata)
    except ValueError as error:
        return [str(error)]
    languages = data.language if isinstance(data.language, list) else []
    texts = [x for x in (data.license, data.library_name, data.pipeline_tag) if x is not None]
    return [
        *(f"language {x!r}" for x in languages if not re.fullmatch(r"[a-z]{2,3}", str(x))),
        *(f"{x!r} is no identifier" for x in texts if not re.fullmatch(r"[a-z0-9.-]+", str(x))),
    ]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answer("GET")

    def do_POST(self):
        self._answer("POST")

    def do_PUT(self):
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        path, body = unquote(urlsplit(self.path).path), self._read_body()
        self.server.requests.append((method, path))
        for part in [part for part in self.server.fails if part in path]:
            return self._reply(self.server.fails.pop(part), {"error": "as the test asked"})
        if method != "PUT" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._reply(401, {"error": "Invalid credentials in Authorization header"})
        for pattern, name in ROUTES.items():
            if found := re.fullmatch(pattern, f"{method} {path}"):
                return self._reply(*getattr(self, name)(body, *found.groups()))
        self._reply(501, {"error": f"{method} {path} is not part of the stand-in"})

    def _read_body(self) -> bytes:
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        chunks = b""
        while size := int(self.rfile.readline(), 16):
            chunks += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return chunks

    def _reply(self, status: int, content: dict) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def whoami(self, body):
        return 200, {"name": "ann", "type": "user", "orgs": []}

    def create_repo(self, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        there = name in self.server.repos
        if not there:
            self.server.repos[name] = {"main": [{".gitattributes": b"*.safetensors filter=lfs\n"}]}
            if asked.get("visibility") == "private":
                self.server.private.add(name)
        return 409 if there else 200, {"url": f"{self.server.endpoint}/{name}"}

    def create_branch(self, body, repo, branch):
        branches = self.server.repos[repo]
        if branch in branches:
            return 409, {"error": "Reference already exists"}
        branches[branch] = [branches["main"][-1]]
        return 200, {}

    def validate(self, body):
        faults = find_faults(json.loads(body)["content"])
        errors = [{"message": fault} for fault in faults]
        return 400 if faults else 200, {"errors": errors, "warnings": []}

    def preupload(self, body, repo, branch):
        head, files = self.server.repos[repo][branch][-1], []
        for file in json.loads(body)["files"]:
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            file = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
            if (content := head.get(file["path"])) is not None:
                sha256 = hashlib.sha256(content).hexdigest()
                file["oid"] = sha256 if mode == "lfs" else git_oid(content)
            files.append(file)
        return 200, {"files": files}

    def batch(self, body, repo):
        objects = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.server.objects:
                url = f"{self.server.endpoint}/objects/{item['oid']}"
                item["actions"] = {"upload": {"href": url}}
            objects.append(item)
        return 200, {"transfer": "basic", "objects": objects}

    def put_object(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        return 200, {}

    def commit(self, body, repo, branch):
        commits = self.server.repos[repo][branch]
        files = dict(commits[-1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            else:
                assert line["key"] == "header", line
        commits.append(files)
        oid = self._oid(commits)
        return 200, {"commitUrl": f"{self.server.endpoint}/{repo}/commit/{oid}", "commitOid": oid}

    def info(self, body, repo, branch=None):
        commits = self.server.repos[repo][branch or "main"]
        return 200, {"id": repo, "sha": self._oid(commits), "private": repo in self.server.private}

    @staticmethod
    def _oid(commits: list) -> str:
        return hashlib.sha1(repr(commits).encode()).hexdigest()


REPO = r"([\w-]+/[\w-]+)"
ROUTES = {
    r"GET /api/whoami-v2": "whoami",
    r"POST /api/repos/create": "create_repo",
    r"POST /api/validate-yaml": "validate",
    rf"POST /api/models/{REPO}/branch/([\w-]+)": "create_branch",
    rf"POST /api/models/{REPO}/preupload/([\w-]+)": "preupload",
    rf"POST /api/models/{REPO}/commit/([\w-]+)": "commit",
    rf"GET /api/models/{REPO}(?:/revision/([\w-]+))?": "info",
    rf"POST /{REPO}\.git/info/lfs/objects/batch": "batch",
    r"PUT /objects/(\w+)": "put_object",
}
