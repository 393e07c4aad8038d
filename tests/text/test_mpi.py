"""Any number of MPI processes, killed anywhere, leave the bytes of one that was left in peace."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.data.corpus import ROOT, SEQUENCE_LENGTH, make_documents, write_wiki
from tests.text.test_pipeline import content_of

DRIVER = ROOT / "tests" / "data" / "driver.py"
MPIRUN = shutil.which("mpirun", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def arguments(vocab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    vocab.write(folder)
    for number in range(4):
        write_wiki(folder / f"wiki_{number}", make_documents(40, seed=number))
    return [
        *("--input", folder / "wiki_*", "--vocab", folder / "spiece.model"),
        *("--sequence-length", SEQUENCE_LENGTH, "--samples-per-shard", 16, "--holdout", 0.1),
    ]


def build(output, arguments, *, processes=1, **environ):
    launcher = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", processes]
    command = [*(launcher if processes > 1 else []), sys.executable, DRIVER, *arguments]
    return subprocess.run(
        [*map(str, command), "--output", str(output)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
    )


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    output = tmp_path_factory.mktemp("one") / "data"
    done = build(output, arguments)
    assert done.returncode == 0, done.stderr
    return content_of(output)


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_gives_the_same_bytes(arguments, undisturbed, tmp_path, processes):
    done = build(tmp_path / "data", arguments, processes=processes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("train:") == 1  # one of them speaks
    assert content_of(tmp_path / "data") == undisturbed


def test_killed_and_taken_up_again(arguments, undisturbed, tmp_path):
    """In the first pass by two, in the second by one, with damage in between; then by three."""
    output = tmp_path / "data"
    done = build(output, arguments, processes=2, KILL_AT="4")
    assert done.returncode != 0
    assert content_of(output).keys() == {"building"}
    notes = sorted((output / "building").glob("unit-*.json"))
    assert len(notes) >= 3
    run = next((output / "building").glob("unit-*.run"))
    content = bytearray(run.read_bytes())
    content[len(content) // 2] ^= 1
    run.write_bytes(content)
    notes[-1].write_bytes(notes[-1].read_bytes()[:-5])

    units = 1 + max(int(path.name[5:11]) for path in notes)
    done = build(output, arguments, KILL_AFTER=str(units + 20))
    assert done.returncode == -9
    assert any(name.endswith(".tar") for name in content_of(output))
    shard = next(output.glob("train-*.tar"))
    shard.write_bytes(shard.read_bytes()[:-512])

    done = build(output, arguments, processes=3)
    assert done.returncode == 0, done.stderr
    assert "pieces of work were kept and 1 damaged ones done again" in done.stdout
    assert content_of(output) == undisturbed


def test_nothing_outlives_its_launcher(arguments, tmp_path):
    """mpirun killed outright: its processes end too, so that the folder is free."""
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", 2, sys.executable, DRIVER]
    launcher = subprocess.Popen(
        [*map(str, [*command, *arguments]), "--output", str(tmp_path / "data")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PAUSE": "300"},
    )
    work = tmp_path / "data" / "building"
    while not list(work.glob("unit-*.json")):
        assert launcher.poll() is None
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    for _ in range(600):
        with (work / ".lock").open("w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process goes on without its launcher")


def test_other_text_or_settings_take_nothing_over(arguments, undisturbed, tmp_path, vocab):
    """A killed build of something else leaves no trace in what is built over it."""
    output = tmp_path / "data"
    done = build(output, [*arguments, "--seed", 5], KILL_AFTER="30")
    assert done.returncode == -9 and any((output / "building").glob("unit-*.json"))
    done = build(output, arguments)
    assert done.returncode == 0, done.stderr
    assert "kept" not in done.stdout
    assert content_of(output) == undisturbed


@pytest.mark.parametrize(
    "environ",
    [{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, {"PMI_SIZE": "4"}],
    ids=["srun", "another mpirun"],
)
def test_silent_worlds_of_one_are_refused(arguments, tmp_path, environ):
    done = build(tmp_path / "data", arguments, **environ)
    assert done.returncode == 2, done.stderr
    assert "4 processes were started, but MPI sees 1" in done.stderr
    assert not (tmp_path / "data").exists()


def test_wrong_input_is_said_once_and_ends_all(arguments, tmp_path):
    done = build(tmp_path / "data", [*arguments, "--holdout", 3], processes=2)
    assert done.returncode == 2
    assert done.stderr.count("albert-ds: --holdout 3: ") == 1
    assert not (tmp_path / "data").exists()


def test_two_builds_do_not_share_a_folder(arguments, tmp_path):
    work = tmp_path / "data" / "building"
    work.mkdir(parents=True)
    with (work / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = build(tmp_path / "data", arguments)
    assert done.returncode == 2 and "another build is writing to it" in done.stderr
