"""Files of JSON: no content crashes their reader, what is refused is named.

Files as we write them, changed at every place: bad_input/json_cases.py.
"""

import json
from dataclasses import asdict, dataclass

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from albert_ds.cli import Number
from albert_ds.errors import UserError
from albert_ds.json_files import MAX_DEPTH, build, check, parse_json, read_json, read_lines
from albert_ds.model.config import ModelConfig
from albert_ds.report.metrics import cut_back
from tests.training import SMALL

MANY = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([-1, 0, 10**30, "auto", "", 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@MANY
@given(st.one_of(st.binary(max_size=80), VALUES.map(lambda x: json.dumps(x).encode())))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"a": ' + b"9" * 5000 + b"}")
@example(b'{"a": 1e999}')
@example(b'{"a": NaN}')
@example(b'{"a": 1, "a": 1}')
@example(b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1))
def test_bytes_are_an_object_of_finite_numbers_or_refused_by_name(content):
    try:
        found = parse_json(content, "file.json")
    except UserError as error:
        assert str(error).startswith("file.json: ")
    else:
        assert isinstance(found, dict)
        json.dumps(found, allow_nan=False)


def test_a_whole_number_may_have_an_exponent():
    """As in DeepSpeed's examples; 2.0 is no whole number, 1e-6 and 1e300 stay as they are."""
    found = parse_json(b'{"a": 5e8, "b": 2.0, "c": 1e-6, "d": 1e300}', "f")
    assert list(map(type, found.values())) == [int, float, float, float]
    assert found == {"a": 500_000_000, "b": 2.0, "c": 1e-6, "d": 1e300}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1, "a": 2}', 'the key "a" stands twice'),
        (b'{"a": -Infinity}', "-Infinity is not finite"),
        (b'{"a": 1e999}', "1e999 is not finite"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", f"deeper than {MAX_DEPTH}"),
        (b"[1, 2]", "must be a JSON object, found [1, 2]"),
    ],
)
def test_what_is_refused_is_named(content, words):
    with pytest.raises(UserError) as caught:
        parse_json(content, "file.json")
    assert words in str(caught.value)


def test_a_field_of_another_type_is_named_with_value_and_what_is_allowed():
    schema = {"a": {"b": [Number(low=0, whole=True)]}, "c": (bool, None), "d": [str, str]}
    check({"a": {"b": [1, 2]}, "c": None, "d": ["x", "y"], "more": 1}, schema, "f")
    for changed, words in (
        ({"a": {"b": [1, "x"]}}, 'f: a.b.1 "x": must be a whole number, at least 0'),
        ({"a": {"b": [1.5]}}, "f: a.b.0 1.5: must be a whole number, at least 0"),
        ({"a": {"b": [2.0]}}, "f: a.b.0 2.0: must be a whole number, at least 0"),
        ({"a": {"b": [True]}}, "f: a.b.0 true: must be a whole number, at least 0"),
        ({"a": {}}, 'f: no "a.b" in it'),
        ({"c": 1}, "f: c 1: must be true or false or null"),
        ({"d": ["x"]}, 'f: d ["x"]: must be a list of 2 values, each a text'),
    ):
        with pytest.raises(UserError) as caught:
            check({"a": {"b": []}, "c": True, "d": ["x", "y"], **changed}, schema, "f")
        assert str(caught.value) == words


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


@MANY
@given(st.lists(st.one_of(st.binary(max_size=20), VALUES.map(lambda x: json.dumps(x).encode()))))
def test_lines_of_any_content_never_stop_a_resume(tmp_path, foreign):
    path, mine = tmp_path / "metrics.jsonl", b'{"step": 3, "loss": 1.5}\n'
    path.write_bytes(mine + b"".join(line + b"\n" for line in foreign) + b'{"step": 4, "lo')
    assert read_lines(path)[0] == {"step": 3, "loss": 1.5}
    cut_back(path, 3)
    assert path.read_bytes().startswith(mine) and b"lo\n" not in path.read_bytes()


def test_lines_left_out_are_counted_once(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\n{"no": 1}\n{"step": 2}\n{"step": 3, "l')
    assert [record["step"] for record in read_lines(path)] == [1, 2]
    assert capsys.readouterr().err.count("3 lines are no records") == 1


@pytest.mark.parametrize("how", ["absent", "a folder", "a link to nothing", "a device"])
def test_what_is_no_file_is_named(tmp_path, how):
    path = tmp_path / "a.json"
    match how:
        case "a folder":
            path.mkdir()
        case "a link to nothing":
            path.symlink_to(tmp_path / "nothing")
        case "a device":
            path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="a.json: (no such file|not a file)"):
        read_json(path)
