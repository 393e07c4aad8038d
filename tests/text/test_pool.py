"""Any number of processes, killed anywhere, leave the bytes of one that was left in peace."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys

import pytest

from albert_ds.base.errors import UserError
from albert_ds.text.pool import Pool, count_started
from tests.data.corpus import ROOT, SEQUENCE_LENGTH, make_documents, write_wiki
from tests.distributed import wait_for
from tests.text.test_pipeline import content_of

DRIVER = ROOT / "tests" / "data" / "driver.py"
MPIRUN = shutil.which("mpirun", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")


def of_mpi(processes):
    return [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", processes]


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


def start(output, arguments, *flags, launcher=(), **environ):
    command = [*launcher, sys.executable, DRIVER, *arguments, *flags, "--output", output]
    return subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
    )


def build(*given, code=0, **options):
    """What is said on stdout and on stderr by a build that must end with `code`."""
    process = start(*given, **options)
    out, err = process.communicate(timeout=500)
    assert process.returncode == code, err
    return out, err


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    output = tmp_path_factory.mktemp("one") / "data"
    build(output, arguments)
    return content_of(output)


def check_same_bytes(arguments, undisturbed, output, *flags, launcher=()):
    out, _ = build(output, arguments, *flags, launcher=launcher)
    assert out.count("train:") == 1  # one of them speaks
    assert content_of(output) == undisturbed


def test_two_of_mpi_give_the_same_bytes(arguments, undisturbed, tmp_path):
    check_same_bytes(arguments, undisturbed, tmp_path / "data", launcher=of_mpi(2))


@pytest.mark.nightly
def test_four_of_mpi_or_of_one_machine_give_the_same_bytes(arguments, undisturbed, tmp_path):
    check_same_bytes(arguments, undisturbed, tmp_path / "mpi", launcher=of_mpi(4))
    check_same_bytes(arguments, undisturbed, tmp_path / "own", "--processes", 4)


def damage(work):
    """Flip a bit of a run that has a note, and cut off the end of another's note."""
    first, *_, last = sorted(work.glob("unit-*.json"))
    run = next(work.glob(f"{first.stem}*.run"))
    content = bytearray(run.read_bytes())
    content[len(content) // 2] ^= 1
    run.write_bytes(content)
    last.write_bytes(last.read_bytes()[:-5])


def test_killed_and_taken_up_again(arguments, undisturbed, tmp_path):
    """In the first pass, one of two; in the second by one, with damage in between; then by two."""
    output = tmp_path / "data"
    two = ("--processes", 2)
    _, err = build(output, arguments, *two, code=5, KILL_AT="4")
    assert err.count("\n") == 1 and "a process of the build was killed" in err
    assert content_of(output).keys() == {"building"}
    assert len(list((output / "building").glob("unit-*.json"))) >= 3
    damage(output / "building")

    units = 1 + max(int(path.name[5:11]) for path in (output / "building").glob("unit-*.json"))
    build(output, arguments, code=-signal.SIGKILL, KILL_AFTER=str(units + 20))
    shard = next((output / "building").glob("train-*.tar"))
    shard.write_bytes(shard.read_bytes()[:-512])

    _, err = build(output, arguments, *two)
    assert "pieces of work were kept and 1 damaged ones are done again" in err
    assert content_of(output) == undisturbed


@pytest.mark.nightly
def test_killed_under_mpi_and_taken_up_by_another_number(arguments, undisturbed, tmp_path):
    process = start(tmp_path / "data", arguments, launcher=of_mpi(3), KILL_AT="4")
    process.communicate(timeout=500)
    assert process.returncode != 0
    damage(tmp_path / "data" / "building")
    _, err = build(tmp_path / "data", arguments, launcher=of_mpi(2))
    assert "pieces of work were kept and 2 damaged ones are done again" in err
    assert content_of(tmp_path / "data") == undisturbed


@pytest.mark.parametrize("way", ["own", pytest.param("mpi", marks=pytest.mark.nightly)])
def test_nothing_outlives_the_process_that_was_started(arguments, tmp_path, way):
    """Killed outright, it takes the others with it, so that the folder is free."""
    flags, launcher = ((), of_mpi(3)) if way == "mpi" else (("--processes", 2), ())
    process = start(tmp_path / "data", arguments, *flags, launcher=launcher, PAUSE="300")
    work = tmp_path / "data" / "building"
    wait_for(lambda: list(work.glob("unit-*.json")) or process.poll() is not None, "a unit")
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=500)  # until no process holds its stdout and stderr any more
    with (work / ".albert-ds.lock").open("w") as lock:

        def is_free() -> bool:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        wait_for(is_free, "the others to end")  # mpirun's processes have pipes of their own


def test_other_text_or_settings_take_nothing_over(arguments, undisturbed, tmp_path):
    """A killed build of something else leaves no trace in what is built over it."""
    output = tmp_path / "data"
    build(output, arguments, "--seed", 5, code=-signal.SIGKILL, KILL_AFTER="30")
    assert any((output / "building").glob("unit-*.json"))
    out, _ = build(output, arguments)
    assert "kept" not in out
    assert content_of(output) == undisturbed


def test_silent_worlds_of_one_are_refused(arguments, tmp_path):
    _, err = build(tmp_path / "data", arguments, code=2, PMI_SIZE="4")
    assert "4 processes were started, but MPI sees 1" in err
    assert not (tmp_path / "data").exists()
    assert count_started({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}) == 4
    assert count_started({"SLURM_STEP_NUM_TASKS": "4"}) == count_started({}) == 1


@pytest.mark.nightly
def test_wrong_input_is_said_once_and_ends_all_of_mpi(arguments, tmp_path):
    _, err = build(tmp_path / "data", arguments, "--holdout", 3, code=2, launcher=of_mpi(2))
    assert err.count("albert-ds: --holdout 3: ") == 1
    assert not (tmp_path / "data").exists()
    _, err = build(tmp_path / "data", arguments, "--processes", 2, code=2, launcher=of_mpi(2))
    assert "--processes 2: mpirun has started the processes already" in err


def raise_error(number):
    raise UserError(f"--number {number}: wrong")


def test_an_error_in_another_process_is_the_error_of_all():
    pool = Pool()
    pool.start(2)
    with contextlib.closing(pool), pytest.raises(UserError, match="^--number 3: wrong$"):
        list(pool.map(raise_error, range(3, 9)))


def test_two_builds_do_not_share_a_folder(arguments, tmp_path):
    work = tmp_path / "data" / "building"
    work.mkdir(parents=True)
    with (work / ".albert-ds.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _, err = build(tmp_path / "data", arguments, code=2)
    assert "another build is writing to it" in err
