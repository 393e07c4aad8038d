"""A slice of `python -m tests.bad_input`, and that its judge sees what it is there to see."""

import time

import pytest

from albert_ds.errors import UserError
from tests.bad_input import judge as judging
from tests.bad_input.__main__ import CLASSES, OF_JSON, as_table, build_data, try_all
from tests.bad_input.judge import (
    AS_PROMISED,
    HANG,
    TRACEBACK,
    WRONG,
    Case,
    judge,
    must_equal,
    must_refuse,
)


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> list[tuple]:
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "work").mkdir()
    return list(try_all(folder / "work", build_data(folder), share=0.06))


def test_no_wrong_input_ends_in_a_traceback_a_hang_or_silence(tried):
    assert not [case for case in tried if case[2] != AS_PROMISED]


def test_every_class_is_tried(tried):
    names = {name for name, *_ in tried}
    assert names > CLASSES.keys() and len(names) >= len(CLASSES) + 15
    assert len(as_table(tried)) == 3 + len(names)
    whole = sum(count for _, count in CLASSES.values()) + OF_JSON * (len(names) - len(CLASSES))
    assert whole > 2000


def refuse():
    raise UserError("--steps 0: must be at least 1")


def speak_at_length():
    raise UserError("one line\nand another")


def crash():
    return {}["key"]


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (refuse, AS_PROMISED),
        (lambda: 3, AS_PROMISED),
        (must_refuse(refuse), AS_PROMISED),
        (must_equal(lambda: 3, 3), AS_PROMISED),
        (speak_at_length, TRACEBACK),
        (crash, TRACEBACK),
        (must_refuse(crash), TRACEBACK),
        (lambda: exit(2), TRACEBACK),
        (must_refuse(lambda: 3), WRONG),
        (must_equal(lambda: 4, 3), WRONG),
    ],
)
def test_the_judge_tells_endings_apart(run, verdict):
    assert judge(Case("", run))[0] == verdict


def test_the_judge_stops_what_hangs(monkeypatch):
    monkeypatch.setattr(judging, "LIMIT", 0.05)
    assert judge(Case("", lambda: time.sleep(60)))[0] == HANG
