"""A damaged checkpoint is never used: training and all readers take the newest whole one."""

import json
import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from albert_ds.base.errors import DamagedData, MachineFailed, UserError
from albert_ds.base.files import compute_crc32
from albert_ds.checkpoint.folder import AVERAGE, FILES, find_newest, open_best
from albert_ds.vocab.vocab import MODEL_NAME, read_vocab
from tests.command import run_command, run_main
from tests.distributed import run_ranks
from tests.finetuning import MODEL, flags, write_checkpoint, write_cola
from tests.models import Bomb, folder_of, run_export, run_import, small_vocab, write_weights
from tests.test_bad_input import as_nobody

SHAPES = {"matrix": (2, 3), "vector": (4,)}


def save(run: Path, step: int | None) -> Path:
    tensors = {n: torch.full(s, float(step or 1)) for n, s in SHAPES.items()}
    return write_weights(run, tensors, step, average=tensors)


def write_tensors(file: str, change):
    """Other tensors in a file, whose checksum in state.json is right."""

    def spoil(folder: Path) -> None:
        content = load_file(folder / file)
        change(content)
        save_file(content, folder / file)
        names = (*FILES, AVERAGE)
        write_state(crc32={name: compute_crc32(folder / name) for name in names})(folder)

    return spoil


def write_state(**changes):
    def spoil(folder: Path) -> None:
        record = json.loads((folder / "state.json").read_text()) | changes
        (folder / "state.json").write_text(json.dumps(record))

    return spoil


def flip(file: str, at: int = -1):
    def spoil(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[at] ^= 1
        (folder / file).write_bytes(content)

    return spoil


def make_folder(folder: Path) -> None:
    (folder / FILES[2]).unlink()
    (folder / FILES[2]).mkdir()


def remove_state(folder: Path) -> None:
    (folder / "state.json").unlink()


DAMAGES = [
    *((flip(file), f"{file} is damaged") for file in (*FILES, AVERAGE)),
    *(
        (lambda f, file=file: (f / file).unlink(), f"{file} is missing")
        for file in (*FILES, AVERAGE)
    ),
    (remove_state, "state.json is missing"),
    (make_folder, f"{FILES[2]} is not a file"),
    (lambda f: (f / "state.json").write_bytes(b"\0" * 99), "state.json is damaged"),
    (lambda f: (f / FILES[0]).write_bytes(pickle.dumps(Bomb(f / "ran"))), f"{FILES[0]} is damaged"),
    (lambda f: (f / "state.json").write_bytes(pickle.dumps(Bomb(f / "ran"))), "state.json is dam"),
    *(
        (write_state(**{name: value}), f"state.json is damaged .*{name}")
        for name, value in (
            *(("step", 1), ("step", 2.5), ("samples", "2"), ("updates", -1), ("loss_scale", 3)),
            *(("format", "x"), ("crc32", {FILES[0]: 1})),
        )
    ),
    *(
        (write_tensors(file, change), f"{file}: {words}")
        for file in (FILES[0], FILES[2], AVERAGE)
        for change, words in (
            (lambda x: x.pop("vector"), "vector is missing"),
            (lambda x: x.update(other=torch.ones(1)), "other is no tensor of the model"),
            (
                lambda x: x.update(matrix=x["matrix"].T.contiguous()),
                r"matrix is \(3, 2\), must be \(2, 3\)",
            ),
            (lambda x: x.update(vector=x["vector"].half()), "vector is of type F16"),
            (lambda x: x.update(vector=x["vector"].int()), "vector is of type I32"),
        )
    ),
]


def test_instead_of_a_damaged_checkpoint_the_one_before_is_used(tmp_path):
    for number, (spoil, words) in enumerate(DAMAGES):
        run = tmp_path / str(number)
        for step in (1, 2):
            save(run, step)
        assert find_newest(run, SHAPES) == (folder_of(run, 2), [])
        spoil(folder_of(run, 2))
        folder, (line,) = find_newest(run, SHAPES)
        assert folder == folder_of(run, 1) and line.endswith("using step-00000001"), words
        shutil.rmtree(folder_of(run, 1))
        with pytest.raises(DamagedData, match=f"step-00000002: {words}"):
            find_newest(run, SHAPES)
        assert not (folder_of(run, 2) / "ran").exists()


@settings(max_examples=40)
@given(
    st.sampled_from(FILES),
    st.floats(0, 1, exclude_max=True),
    st.one_of(st.integers(0, 7), st.none()),
)
def test_any_flipped_bit_and_any_cut_is_seen(tmp_path, file, where, bit):
    if not (tmp_path / "checkpoints").exists():
        save(tmp_path, 1)
        save(tmp_path, 2)
    path = folder_of(tmp_path, 2) / file
    whole = path.read_bytes()
    at = int(where * len(whole))
    damaged = bytearray(whole[:at] if bit is None else whole)
    if bit is not None:
        damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    assert find_newest(tmp_path)[0] == folder_of(tmp_path, 1)
    path.write_bytes(whole)


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "checkpoints" / "latest").write_text("step-00000003\n")
    shutil.rmtree(folder_of(tmp_path, 3))
    with pytest.raises(DamagedData, match="step-00000003"):
        find_newest(tmp_path)
    assert find_newest(tmp_path / "another") == (None, [])
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "checkpoints").write_text("a note")
    with pytest.raises(UserError, match="checkpoints: is no folder"):
        find_newest(tmp_path / "file")


def test_a_later_format_is_refused_and_no_older_one_taken(tmp_path):
    save(tmp_path, 1)
    write_state(format=2, loss_scale="as that version has it")(save(tmp_path, 2))
    with pytest.raises(UserError, match="step-00000002/state.json: format 2; .* format 1"):
        find_newest(tmp_path)


@pytest.mark.parametrize("what", [".", "step-00000002", "step-00000002/state.json"])
def test_what_may_not_be_read_is_not_absent(what):
    with tempfile.TemporaryDirectory() as name:  # other users may not enter pytest's own folders
        run = Path(name)
        run.chmod(0o755)
        for step in (1, 2):
            save(run, step)
        closed = run / "checkpoints" / what
        closed.chmod(0)
        try:
            with as_nobody(), pytest.raises(MachineFailed, match="Permission denied") as caught:
                find_newest(run)
        finally:
            closed.chmod(0o755)
        assert str(closed) in str(caught.value)
        assert find_newest(run) == (folder_of(run, 2), [])


def test_best_weights_that_are_not_whole_are_an_error(tmp_path):
    for number, (spoil, words, shapes) in enumerate(
        [
            (flip(FILES[0]), "weights.safetensors is damaged", SHAPES),
            (lambda f: (f / FILES[0]).unlink(), "weights.safetensors is missing", SHAPES),
            (lambda f: (f / "state.json").unlink(), "state.json is missing", SHAPES),
            (lambda f: None, "matrix is", {**SHAPES, "matrix": (3, 2)}),
        ]
    ):
        spoil(save(tmp_path / str(number), None))
        with pytest.raises(DamagedData, match=f"checkpoints/best: .*{words}"):
            open_best(tmp_path / str(number), shapes)


def read_all_everywhere(rank: int, runs: list[Path], data: Path, work: Path) -> list[dict]:
    return [read_everywhere(run, data, work) for run in runs]


def read_everywhere(run: Path, data: Path, work: Path) -> dict[str, str]:
    """By command: its code and what it says on stderr of the run."""
    from albert_ds.checkpoint.initial import read_initial_weights
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.settings.finetune import read_config

    def start_tuning(argv: list[str]) -> None:
        read_config(argv, world_size=1)

    def start_training(argv: list[str]) -> None:
        vocab_size = read_vocab(data / MODEL_NAME).size
        read_initial_weights(ModelFolder(run), replace(MODEL, vocab_size=vocab_size))

    report = work / f"{run.name}.json"
    probe = ("--data", data, "--samples", 8, "--head-samples", 8, "--output", report)
    tuning = flags("glue/cola", work / "cola", run, work / "tuned")
    done = {
        "export": run_command("export", "--checkpoint", run, "--output", work / "hf" / run.name),
        "fill-mask": run_command("fill-mask", "--checkpoint", run, "a [MASK]"),
        "probe": run_command("probe", "--checkpoint", run, *probe),
        "finetune": run_main(start_tuning, *tuning),
        "--init-from": run_main(start_training),
    }
    said = {name: f"code {each.code}: {each.err}" for name, each in done.items()}
    if report.exists():
        said["probe"] += json.loads(report.read_text())["weights"]
    return said


def test_every_command_reads_the_newest_whole_checkpoint_and_says_which(data, tmp_path):
    vocab = read_vocab(data / MODEL_NAME)
    first = write_checkpoint(tmp_path / "sound", vocab, vocab_size=vocab.size)
    weights = load_file(first / "checkpoints" / "step-00000001" / FILES[0])
    write_weights(first, {name: 2 * x for name, x in weights.items()}, step=2)
    write_cola(tmp_path / "cola")
    # The pointer for scripts may be of before a kill, or empty: nobody believes it.
    cases = {
        "sound": ("", None),
        "flipped": ("step-00000002\n", flip(FILES[0])),
        "no-state": ("step-00000001", remove_state),
    }
    runs = {name: first if name == "sound" else tmp_path / name for name in cases}
    for name, (pointer, spoil) in cases.items():
        if spoil is not None:
            shutil.copytree(first, runs[name])
            spoil(folder_of(runs[name], 2))
        (runs[name] / "checkpoints" / "latest").write_text(pointer)
    # All are damaged, or the damaged one is named itself: no weights without their checksum.
    alone = Path(shutil.copytree(runs["no-state"], tmp_path / "alone"))
    shutil.rmtree(folder_of(alone, 1))
    damaged = [alone, folder_of(alone, 2)]
    (said,) = run_ranks(read_all_everywhere, 1, [*runs.values(), *damaged], data, tmp_path)
    for (name, run), of_run in zip(runs.items(), said[: len(runs)], strict=True):
        step = 2 if name == "sound" else 1
        for command, words in of_run.items():
            assert words.startswith("code 0: "), (name, command, words)
            is_said = f"{folder_of(run, 2)}: " in words and "using step-00000001" in words
            assert is_said == (name != "sound"), (name, command, words)
        assert of_run["probe"].endswith(f"{name}/step-0000000{step}")
        embedding = load_file(tmp_path / "hf" / name / "model.safetensors")
        tensor = embedding["albert.embeddings.word_embeddings.weight"]
        assert torch.equal(tensor, step * weights["albert.embeddings.word.weight"]), name
    for of_run in said[len(runs) :]:
        for command, words in of_run.items():
            assert words.startswith("code 3: "), (command, words)
            assert "state.json is missing" in words, (command, words)
    assert not (tmp_path / "hf" / "alone").exists()
    assert not (tmp_path / "hf" / "step-00000002").exists()


def test_an_imported_folder_has_its_own_place_and_a_checksum_too(text_file, tmp_path):
    vocab = small_vocab(text_file)
    hf = run_export(write_checkpoint(tmp_path / "run", vocab), tmp_path / "hf")
    imported = run_import(hf, tmp_path / "imported")
    for spoil, words in ((flip(FILES[0]), "is damaged"), (remove_state, "state.json is missing")):
        run = Path(shutil.copytree(imported, tmp_path / f"spoilt-{len(words)}"))
        spoil(run / "checkpoints" / "imported")
        with pytest.raises(DamagedData, match=f"checkpoints/imported: .*{words}"):
            run_export(run, tmp_path / "again")
    again = run_export(imported, tmp_path / "again")
    assert (again / FILES[0].replace("weights", "model")).read_bytes() == (
        hf / "model.safetensors"
    ).read_bytes()


def test_what_the_user_has_kept_in_a_deleted_checkpoint_is_none(text_file, tmp_path):
    run = write_checkpoint(tmp_path / "run", small_vocab(text_file))
    kept = folder_of(run, 0)
    kept.mkdir()
    (kept / "probe.json").write_text("{}")
    run_export(run, tmp_path / "hf", "--revision-per-checkpoint")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-00000001"]
    with pytest.raises(UserError, match="has 1$"):
        run_export(run, tmp_path / "mean", "--average-last", "2")


def test_a_damaged_checkpoint_stops_the_export_of_all_before_the_first(text_file, tmp_path):
    run = write_checkpoint(tmp_path / "run", small_vocab(text_file))
    shutil.copytree(folder_of(run, 1), folder_of(run, 2))
    write_state(step=2)(folder_of(run, 2))
    flip(FILES[0])(folder_of(run, 2))
    with pytest.raises(DamagedData, match="step-00000002: weights.safetensors is damaged"):
        run_export(run, tmp_path / "hf", "--revision-per-checkpoint")
    assert not (tmp_path / "hf").exists()
