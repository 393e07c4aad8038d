"""Pushing exports to a Hub on this machine (tests/stand_in_hub.py), and loading what came there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session, constants
from safetensors.torch import load_file, save_file

from albert_ds.commands.push import list_revisions, push
from albert_ds.data.vocab import RELEASED, train_vocab
from albert_ds.errors import MachineFailed, UserError
from albert_ds.interop.export import export_hf, list_checkpoints_of
from albert_ds.interop.weights import read_weights
from tests.conftest import ROOT
from tests.finetuning import write_checkpoint
from tests.stand_in_hub import TOKEN, serve

# Of huggingface_hub's own request to httpx2.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
STEPS = ["step-00000001", "step-00000002"]


@pytest.fixture(scope="module")
def exports(tmp_path_factory, text_file) -> Path:
    """A folder for each of two checkpoints of a run, with other weights."""
    folder = tmp_path_factory.mktemp("run")
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    run = write_checkpoint(folder / "run", train_vocab(lines, RELEASED, vocab_size=300))
    first = run / "checkpoints" / STEPS[0]
    second = first.with_name(STEPS[1])
    second.mkdir()
    weights = {name: x + 1 for name, x in load_file(first / "weights.safetensors").items()}
    save_file(weights, second / "weights.safetensors")
    (first.parent / "latest").write_text(STEPS[1])
    for checkpoint in list_checkpoints_of(run):
        export_hf(checkpoint, folder / "hf" / checkpoint.name)
    return folder / "hf"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found
        close_session()


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def find_sent(hub) -> list[str]:
    return [path for method, path in hub.requests if method == "PUT" or "/commit/" in path]


def test_what_the_hub_received_loads_and_is_the_model(hub, exports, tmp_path):
    from transformers import AutoModelForPreTraining, AutoTokenizer

    url = push(exports / STEPS[1], "model")
    assert url == f"{hub.endpoint}/ann/model" and list(hub.repos["ann/model"]) == ["main"]
    got = hub.download("ann/model", "main", tmp_path / "got")
    (got / ".gitattributes").unlink()
    assert read_folder(got) == read_folder(exports / STEPS[1])
    assert len(AutoTokenizer.from_pretrained(got)) == 300
    found = AutoModelForPreTraining.from_pretrained(got).state_dict()
    for name, x in load_file(exports / STEPS[1] / "model.safetensors").items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=0)
    torch.testing.assert_close(read_weights(got)[1], read_weights(exports.parent / "run")[1])


def test_each_checkpoint_is_a_revision_and_the_newest_is_main(hub, exports, tmp_path):
    push(exports, "team/model")
    branches = hub.repos["team/model"]
    assert branches.keys() == {*STEPS, "main"}
    for revision in branches:
        got = hub.download("team/model", revision, tmp_path / revision)
        (got / ".gitattributes").unlink()
        expected = STEPS[1] if revision == "main" else revision
        assert read_folder(got) == read_folder(exports / expected)
    first, second = (read_weights(tmp_path / step)[1] for step in STEPS)
    torch.testing.assert_close({name: x + 1 for name, x in first.items()}, second)
    uploads = [path for method, path in hub.requests if method == "PUT" and "objects" in path]
    assert len(uploads) == len({*uploads}), "a file was sent twice"


def test_a_second_push_sends_nothing(hub, exports):
    push(exports, "model")
    hub.requests.clear()
    push(exports, "ann/model")
    assert find_sent(hub) == [] and hub.requests


@pytest.mark.parametrize("place", ["/commit/step-00000002", "/objects/", "/commit/main"])
def test_a_push_that_failed_is_continued(hub, exports, place):
    hub.fails[place] = 507
    with pytest.raises(MachineFailed, match="507.*; pushed until then: .*; the same command co"):
        push(exports, "model")
    if place == "/commit/step-00000002":
        assert len(hub.repos["ann/model"][STEPS[0]]) == 2  # is there, and not sent again
    assert len(hub.repos["ann/model"]["main"]) == 1, "main is what the last whole push made it"
    kept = {f"/objects/{oid}" for oid in hub.objects}
    hub.requests.clear()
    push(exports, "model")
    assert not kept & {*find_sent(hub)}
    assert hub.repos["ann/model"]["main"][-1] == hub.repos["ann/model"][STEPS[1]][-1]
    assert [len(commits) for commits in hub.repos["ann/model"].values()] == [2, 2, 2]


def test_a_newer_checkpoint_becomes_main(hub, exports, tmp_path):
    (tmp_path / STEPS[0]).symlink_to(exports / STEPS[0])
    push(exports / STEPS[0], "model")
    push(exports, "model")
    assert hub.repos["ann/model"]["main"][-1] == hub.repos["ann/model"][STEPS[1]][-1]
    assert len(hub.repos["ann/model"]["main"]) == 3  # nothing is rewritten: history stays


@pytest.mark.parametrize(
    ("token", "words"),
    [(None, "not logged in: type hf auth login$"), ("x", "type hf auth login .Invalid user token")],
)
def test_who_is_not_logged_in_is_told_so(hub, exports, monkeypatch, token, words):
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=words):
        push(exports, "model")
    assert hub.repos == {}


def test_a_card_that_the_hub_refuses_is_a_users_error(hub, exports, tmp_path):
    for path in (exports / STEPS[0]).iterdir():
        (tmp_path / path.name).symlink_to(path)
    card = (tmp_path / "README.md").read_text().replace("# license: FILL", "license: FILL")
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(UserError, match="Invalid metadata in README.md"):
        push(tmp_path, "model")
    assert find_sent(hub) == []


def test_a_private_push_never_goes_to_a_public_repository(hub, exports):
    push(exports / STEPS[0], "secret", private=True)
    assert hub.private == {"ann/secret"}
    push(exports / STEPS[0], "known")
    hub.requests.clear()
    with pytest.raises(UserError, match="--private: .*/ann/known exists and is public"):
        push(exports / STEPS[1], "known", private=True)
    assert find_sent(hub) == []


def test_a_wrong_name_or_no_connection_is_one_line(hub, exports, monkeypatch):
    with pytest.raises(UserError, match="--repo a/b/c at .*: Repo id must be in the form"):
        push(exports, "a/b/c")
    assert hub.repos == {}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MachineFailed, match="127.0.0.1:9: .*; pushed until then: nothing"):
        push(exports, "model")


def test_only_an_export_is_pushed(exports, tmp_path):
    for folder in (tmp_path, tmp_path / "none", exports.parent / "run"):
        with pytest.raises(UserError, match="must be a folder that export wrote"):
            list_revisions(folder)
    (tmp_path / STEPS[0]).mkdir()
    with pytest.raises(UserError, match="step-00000001 has no model.safetensors"):
        list_revisions(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="and not both"):
        list_revisions(tmp_path)


def test_the_command_as_it_is_typed(hub, exports, tmp_path):
    """With the variables that huggingface_hub itself reads."""
    (tmp_path / "token").write_text(TOKEN)
    environ = {name: x for name, x in os.environ.items() if not name.startswith("HF_")}
    environ |= {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path),
    }
    argv = ["--input", str(exports), "--repo", "typed"]
    done = subprocess.run(
        [sys.executable, "-m", "albert_ds", "push", *argv],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    address = f"{hub.endpoint}/ann/typed"
    assert done.stdout == f"pushed {exports} to {address}: {', '.join(STEPS)}, main\n"
    assert f"{exports / STEPS[1]}/README.md: has places marked FILL IN" in done.stderr
    assert hub.repos["ann/typed"].keys() == {*STEPS, "main"}
