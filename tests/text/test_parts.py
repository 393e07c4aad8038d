"""Parts of a build, on any machines and in any order, leave the bytes of one process."""

import shutil
import signal

import pytest

from albert_ds.base.errors import UserError
from albert_ds.commands import shards
from albert_ds.data.shards import INDEX_NAME
from tests.data.corpus import make_documents, write_wiki
from tests.distributed import wait_for
from tests.text.test_pipeline import content_of
from tests.text.test_pool import arguments, build, start, undisturbed

__all__ = ["arguments", "undisturbed"]  # fixtures


def content_of_pieces(output):
    """All unfinished work; a lock names who had it last."""
    return {k: v for k, v in content_of(output / "building").items() if not k.endswith(".lock")}


@pytest.mark.parametrize("number", [1, pytest.param(7, marks=pytest.mark.nightly)])
def test_parts_one_after_another(arguments, undisturbed, tmp_path, number):
    output = tmp_path / "data"
    for i in range(number, 0, -1):
        out, _ = build(output, arguments, "--piece", f"{i}/{number}")
        assert f"piece {i}/{number}: " in out
    for i in range(number, 1, -1):
        build(output, arguments, "--join", f"{i}/{number}")
    assert content_of(output).keys() == {"building"}
    out, _ = build(output, arguments, "--join")
    assert out.count("train:") == 1
    assert content_of(output) == undisturbed


def test_parts_at_the_same_time_one_killed_and_one_repeated(arguments, undisturbed, tmp_path):
    """Three pieces and two joins; a piece and a join are killed outright and started again."""
    output = tmp_path / "data"
    work = tmp_path / "data" / "building"
    environs = [{}, {"KILL_AFTER": "2"}, {}]
    pieces = [
        start(output, arguments, "--piece", f"{i}/3", **environ)
        for i, environ in enumerate(environs, 1)
    ]
    for process in pieces:
        process.communicate(timeout=500)
    assert [process.returncode for process in pieces] == [0, -signal.SIGKILL, 0]
    _, err = build(output, arguments, "--join", code=2)
    assert "are not encoded; allowed: after --piece 2/3\n" in err
    notes = {path: path.stat().st_mtime_ns for path in work.glob("unit-*.json")}
    for i in (2, 3):
        _, err = build(output, arguments, "--piece", f"{i}/3")
        assert "pieces of work were kept and 0 damaged ones are done again" in err
    _, err = build(output, arguments, "--piece", "1/1")  # by another number nothing is left to do
    assert f"{len(list(work.glob('unit-*.json')))} pieces of work were kept" in err
    assert {path: path.stat().st_mtime_ns for path in notes} == notes  # theirs and the others'

    joins = [start(output, arguments, "--join", f"{i}/2", KILL_AFTER=f"{2 * i}") for i in (1, 2)]
    for process in joins:
        process.communicate(timeout=500)
        assert process.returncode == -signal.SIGKILL
    build(output, arguments, "--join", "2/2")
    _, err = build(output, arguments, "--join", "--processes", 2)
    assert "pieces of work were kept and 0 damaged ones are done again" in err
    assert content_of(output) == undisturbed
    _, err = build(output, arguments, "--piece", "2/3", code=2)
    assert "holds a built data set already" in err
    assert content_of(output) == undisturbed


def test_who_is_at_work_is_left_in_peace(arguments, tmp_path):
    output = tmp_path / "data"
    work = tmp_path / "data" / "building"
    process = start(output, arguments, "--piece", "2/3", PAUSE="300")
    try:
        wait_for(lambda: any(work.glob("unit-*.json")), "a unit")
        for flags, refusal in {
            ("--piece", "2/3"): "--piece 2/3: --piece 2/3 is at work in",
            ("--piece", "1/2"): "--piece 1/2: --piece 2/3 is at work in",
            ("--join",): "--piece 2/3 (process",
            (): "--piece 2/3 (process",
        }.items():
            _, err = build(output, arguments, *flags, code=2)
            assert err.count("\n") == 1 and refusal in err
        assert any(work.glob("unit-*.json"))
    finally:
        process.kill()
        process.communicate()


def test_pieces_of_other_text_or_settings_are_not_joined(arguments, tmp_path):
    folder = tmp_path / "text"
    shutil.copytree(arguments[1].parent, folder)
    given = [str(part).replace(str(arguments[1].parent), str(folder)) for part in arguments]
    output = tmp_path / "data"
    build(output, given, "--piece", "1/2")
    work = content_of_pieces(output)
    for flags in (("--piece", "2/2"), ("--join",)):
        _, err = build(output, given, *flags, "--seed", 5, code=2)
        assert "holds pieces made with --seed 0, not 5; name another --output" in err
    survey = output / "building" / "survey.json"
    kept = survey.read_text()
    survey.write_text(kept.replace('"version": "', '"version": "9.'))
    _, err = build(output, given, "--piece", "2/2", code=2)
    assert "holds pieces made by albert-ds 9." in err
    survey.write_text(kept)
    write_wiki(folder / "wiki_0", make_documents(40, seed=9))
    _, err = build(output, given, "--piece", "2/2", code=2)
    assert "holds pieces of another --input, or of files that have changed since" in err
    assert content_of_pieces(output) == work


def test_every_command_holds_the_text_to_its_own_limits(arguments, tmp_path):
    """A survey that was made with wider ones is made again."""
    output = tmp_path / "data"
    build(output, arguments, "--piece", "1/1", "--language", "ko", "--any-script")
    for flags in (("--piece", "1/1"), ("--join",), ()):
        _, err = build(output, arguments, *flags, "--language", "ko", code=2)
        assert err.count("\n") == 1 and "accept it with --any-script" in err
    assert any((output / "building").glob("unit-*.json"))
    build(output, arguments, "--join", "--language", "ko", "--any-script")


def test_what_was_damaged_after_a_piece_is_not_joined(arguments, undisturbed, tmp_path):
    """A join reads of a run what it writes, and proves it there."""
    output = tmp_path / "data"
    build(output, arguments, "--piece", "1/1")
    run = sorted((output / "building").glob("*.run"))[1]
    content = bytearray(run.read_bytes())
    content[-3] ^= 1
    run.write_bytes(content)
    _, err = build(output, arguments, "--join", code=3)
    assert f"{run.name}: not what was written" in err
    assert not (output / INDEX_NAME).exists()
    _, err = build(output, arguments, "--piece", "1/1")
    assert "1 damaged ones are done again" in err
    build(output, arguments, "--join")
    assert content_of(output) == undisturbed


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3", "1/2/3", "١/3"])
@pytest.mark.parametrize("step", ["--piece", "--join"])
def test_a_part_is_a_number_of_a_number(step, text):
    given = ["--input", "x", "--vocab", "v", "--output", "o"]
    with pytest.raises(UserError, match=f"^{step} {text}: must be I/N, two whole numbers"):
        shards.build_parser().parse_args([*given, f"{step}={text}"])
