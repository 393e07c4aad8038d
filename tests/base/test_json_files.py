"""Files of JSON: what is refused is named. No content crashes a reader: bad_input/json_cases.py."""

from dataclasses import asdict, dataclass

import pytest

from albert_ds.base.errors import UserError
from albert_ds.base.json_files import MAX_DEPTH, build, parse_json, read_lines
from albert_ds.model.config import ModelConfig
from albert_ds.training.metrics import cut_back
from tests.runs import SMALL


def test_a_whole_number_may_have_an_exponent():
    """As in DeepSpeed's examples; 2.0 is no whole number, 1e-6 and 1e300 stay as they are."""
    numbers = parse_json(b'{"a": 5e8, "b": 2.0, "c": 1e-6, "d": 1e300}', "f")
    assert list(map(type, numbers.values())) == [int, float, float, float]
    assert numbers == {"a": 500_000_000, "b": 2.0, "c": 1e-6, "d": 1e300}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1, "a": 2}', 'the key "a" stands twice'),
        (b'{"a": -Infinity}', "-Infinity is not finite"),
        (b'{"a": 1e999}', "1e999 is not finite"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", f"deeper than {MAX_DEPTH}"),
        (b"[" * 10**5, "not JSON: maximum recursion depth exceeded"),
        (b"[1, 2]", "must be a JSON object, found [1, 2]"),
    ],
)
def test_what_is_refused_is_named(content, words):
    with pytest.raises(UserError) as caught:
        parse_json(content, "file.json")
    assert words in str(caught.value)


def test_a_dataclass_is_built_from_its_own_types_only():
    assert build(ModelConfig, asdict(SMALL), "f") == SMALL
    for changed in ({"hidden_size": "32"}, {"pair_head": 1}, {"new": 1}, {"hidden_size": 1.5}):
        with pytest.raises(UserError, match=next(iter(changed))):
            build(ModelConfig, {**asdict(SMALL), **changed}, "f")

    @dataclass
    class Needs:
        a: int
        b: float = 1.0

    assert build(Needs, {"a": 1}, "f") == Needs(1)
    with pytest.raises(UserError, match='no "a" in it'):
        build(Needs, {"b": 1.0}, "f")


def test_foreign_lines_never_stop_a_resume_and_are_counted_once(tmp_path, capsys):
    foreign = (
        b"\xff",
        b"[]",
        b"null",
        b'{"no": 1}',
        b'{"step": "3"}',
        b'{"step": 1.5}',
        b"[" * 10**5,
    )
    path = tmp_path / "metrics.jsonl"
    records = b'{"step": 3, "loss": 1.5}\n{"step": 2}\n'
    path.write_bytes(
        records + b"".join(x + b"\n" for x in foreign) + b'{"step": 4}\n{"step": 5, "lo'
    )
    assert [record["step"] for record in read_lines(path)] == [3, 2, 4]
    assert capsys.readouterr().err.count("8 lines are no records") == 1
    assert cut_back(tmp_path, 3) == [{"step": 3, "loss": 1.5}, {"step": 2}]
    assert path.read_bytes() == records
