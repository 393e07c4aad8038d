"""Read JSON that another program or a person wrote. Every error is one line: file, field, value.

`parse_json` bounds size and nesting, and refuses duplicate keys and numbers that are not finite.
`check` compares the values with a schema. A schema is one of

    {"key": schema}     an object
    [schema]            a list of any length; with more schemas, a list of that length
    (schema, ...)       one of these
    Range, bool, str    a number in a range, true or false, a text; also dict, list
    any other value     this value
"""

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from albert_ds.base.cli import Range, log_line, non_negative
from albert_ds.base.errors import DamagedData, UserError

T = TypeVar("T")
MAX_BYTES = 1 << 27
MAX_DEPTH = 32
MAX_NUMBER = 10**40  # of whole numbers: transformers writes 10**30 as a length without limit


def read_json(path: Path, name: str | None = None) -> dict:
    """The JSON object in a file; UserError, which names `name` or the path, where there is none."""
    name = name or str(path)
    return parse_json(read_bytes(path, name), name)


def read_data(path: Path, schema: dict) -> dict:
    """The object in a file of a task's data, which has the keys of `schema`.

    Raises UserError where the file cannot be read, DamagedData where its content is wrong.
    """
    content = read_bytes(path, f"--data: {path}")
    try:
        record = parse_json(content, str(path))
        check(record, schema, str(path))
    except UserError as error:
        raise DamagedData(str(error)) from None
    return record


def read_bytes(path: Path, name: str) -> bytes:
    """A whole file; UserError, which names `name`, where it cannot be read or is over the limit."""
    try:
        check_file(path, name)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from None
    check_size(content, name)
    return content


def check_file(path: Path, name: str) -> None:
    """Raise UserError for what is no file: to open a pipe may take for ever."""
    if not path.exists():
        raise UserError(f"{name}: no such file")
    if not path.is_file():
        raise UserError(f"{name}: not a file")


def check_size(content: bytes, name: str) -> None:
    """Raise UserError for what was read to beyond the limit."""
    if len(content) > MAX_BYTES:
        raise UserError(f"{name}: over {MAX_BYTES >> 20} MB; must be smaller")


def parse_json(content: bytes, name: str) -> dict:
    """The JSON object of UTF-8 text, all of it text that can be written as UTF-8 again."""
    check_size(content, name)
    try:
        record = json.loads(
            content.decode(),
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_number,
            parse_constant=_number,
        )
        if b"\\u" in content:
            json.dumps(record, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{name}: must be a JSON object, found {_show(record)}")
    _check_depth(record, name)
    return record


def read_lines(path: Path) -> list[dict]:
    """The JSON objects of a file of lines, such as metrics.jsonl.

    Lines that are no JSON object with a whole number "step" are left out; one message counts them.
    A killed process leaves such a line. Raises OSError.
    """
    records = []
    left_out = 0
    if path.exists() and not path.is_file():  # to open a pipe may take for ever
        raise UserError(f"{path}: not a file")
    with path.open("rb") as file:
        for line in file:
            try:
                record = parse_json(line, path.name)
                check(record, {"step": non_negative}, path.name)
                records.append(record)
            except UserError:
                left_out += 1
    if left_out:
        log_line(f"{path}: {left_out} lines are no records of a step; they are left out")
    return records


def build(kind: type[T], record: Any, name: str) -> T:
    """The dataclass of a JSON object, whose types and names are those of the fields."""
    types = {
        int: Range(is_integer=True),
        int | None: (Range(is_integer=True), None),
        float: Range(),
        bool: bool,
        str: str,
        tuple[str, ...]: [str],
    }
    declared: Any = [f for f in fields(kind) if f.init]  # ty: ignore[invalid-argument-type]
    schema = {field.name: types[field.type] for field in declared}
    needed = {field.name: types[field.type] for field in declared if field.default is MISSING}
    check(record, schema, name, is_closed=True)
    check(record, needed, name)
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})


def check(
    value: Any, schema: Any, name: str, at: tuple[str, ...] = (), *, is_closed: bool = False
) -> None:
    """Raise UserError for the first field, of those `at` a place in `name`, that does not fit.

    A closed schema allows only its own keys, and each may be absent. An open one needs all its
    keys, and allows others.
    """
    place = json.dumps(".".join(at), ensure_ascii=False)[1:-1]  # a key may hold a line end
    where = f"{name}: {place} " if at else f"{name}: "
    if isinstance(schema, dict) and isinstance(value, dict):
        unknown = sorted(value.keys() - schema.keys())
        if is_closed and unknown:
            raise UserError(
                f"{name}: unknown key {json.dumps('.'.join([*at, unknown[0]]))}; "
                f"allowed: {', '.join(sorted(schema))}"
            )
        for key, inner in schema.items():
            if key in value:
                check(value[key], inner, name, (*at, key), is_closed=is_closed)
            elif not is_closed:
                raise UserError(f'{name}: no "{".".join([*at, key])}" in it')
    elif isinstance(schema, list) and isinstance(value, list) and len(schema) in (1, len(value)):
        for number, item in enumerate(value):
            inner = schema[number % len(schema)]
            check(item, inner, name, (*at, str(number)), is_closed=is_closed)
    elif not _fits(value, schema):
        raise UserError(f"{where}{_show(value)}: must be {_describe(schema)}")


def _fits(value: Any, schema: Any) -> bool:
    if isinstance(schema, tuple):
        return any(_fits(value, each) for each in schema)
    if isinstance(schema, type):
        return isinstance(value, schema)
    if isinstance(schema, Range):
        kinds = int if schema.is_integer else int | float  # 2.0 is no whole number
        return isinstance(value, kinds) and not isinstance(value, bool) and value in schema
    return type(value) is type(schema) and value == schema


def _describe(schema: Any) -> str:
    if isinstance(schema, tuple):
        if all(isinstance(each, str | int) for each in schema):
            return f"one of {', '.join(map(json.dumps, schema))}"
        return " or ".join(map(_describe, schema))
    if isinstance(schema, type):
        return {bool: "true or false", str: "a text", dict: "an object", list: "a list"}[schema]
    if isinstance(schema, Range):
        return f"a {'whole ' if schema.is_integer else ''}number, {schema}"
    if isinstance(schema, dict):
        return "an object"
    if isinstance(schema, list):
        size = f"{len(schema)} values" if len(schema) > 1 else "values"
        return f"a list of {size}, each {_describe(schema[0])}"
    return json.dumps(schema)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {_show(twice)} stands twice in one object")
    return record


def _whole(text: str) -> int:
    if len(text) > 42 or abs(int(text)) >= MAX_NUMBER:
        raise ValueError(f"the number {text[:24]} is too large")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"the number {text[:24]} is not finite")
    # DeepSpeed's users write 5e8 for a number of elements.
    return int(value) if "." not in text and value.is_integer() and abs(value) < 1 << 53 else value


def _check_depth(record: dict, name: str) -> None:
    """Raise UserError for deep nesting, also in what no schema reads: it is kept as it stands."""
    level: list[Any] = [record]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise UserError(f"{name}: nested deeper than {MAX_DEPTH} levels")
