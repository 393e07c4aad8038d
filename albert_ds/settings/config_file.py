"""--config FILE: flags from YAML, or from a run's config.json. What is typed wins, and is said."""

import json
from argparse import Action, Namespace, _StoreTrueAction
from dataclasses import fields
from pathlib import Path
from typing import Any

from albert_ds.base.cli import Flag, Parser, find_word, log_line, path, suggest
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import parse_json, read_bytes
from albert_ds.base.plugin import check_plugin
from albert_ds.model.config import SIZES

CONFIG = Flag(
    help="flags in YAML (a name and its value a line), or the config.json of a run; what is typed "
    "as well wins, --output must be typed",
    type=path,
    metavar="FILE",
    group="what to run",
)
FACTS = {"versions", "trained_length", "vocab_sha256"}  # of a run's config.json, beside its fields


def parse(parser: Parser, argv: list[str], config: Any) -> Namespace:
    """The flags in `argv`, after those of its --config; `config`: the dataclass of a run.

    Raises UserError for a wrong key, a wrong value, or a file of another kind of run.
    """
    file = find_word(argv, "--config")
    if not file:
        return parser.parse_args(argv)
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    values = _read(Path(file), actions, config)
    pairs = [group for group in parser._mutually_exclusive_groups if group.required]
    needed = [action for action in actions.values() if action.required]
    for each in (*needed, *pairs):
        each.required = False
    try:
        words = [w for dest, v in values.items() for w in _as_words(actions[dest], v)]
        parsed = parser.parse_args(words)
    except UserError as error:
        raise UserError(f"--config {file}: {error}") from None
    parser.set_defaults(**{dest: getattr(parsed, dest) for dest in values})
    for action in needed:
        action.required = action.dest not in values
    for pair in pairs:
        pair.required = not any(action.dest in values for action in pair._group_actions)
    args = parser.parse_args(argv)
    for pair in parser._mutually_exclusive_groups:
        dests = [action.dest for action in pair._group_actions]
        if any(getattr(args, dest) is not None for dest in dests if dest not in values):
            for dest in filter(values.__contains__, dests):  # the other of the pair was typed
                setattr(args, dest, None)
                log_line(f"--config {file}: {actions[dest].option_strings[0]} is not taken")
                del values[dest]
    typed = {dest: getattr(args, dest) for dest in values}
    typed = {dest: v for dest, v in typed.items() if v != getattr(parsed, dest)}
    if typed:
        said = (f"{actions[d].option_strings[0]} {values[d]} by {v}" for d, v in typed.items())
        log_line(f"--config {file}: the command line replaces {'; '.join(said)}")
    return args


def _read(file: Path, actions: dict[str, Action], config: Any) -> dict[str, Any]:
    """Values by the place that a flag fills."""
    name = f"--config {file}"
    content = read_bytes(file, name)
    if content.lstrip().startswith(b"{"):
        record = parse_json(content, name)
    else:
        record = _parse_yaml(content, name)
    if "versions" in record:
        return _of_run(record, actions, config, name)
    by_flag = {a.option_strings[0].lstrip("-").replace("-", "_"): d for d, a in actions.items()}
    values = {}
    for key, value in record.items():
        dest = by_flag.get(str(key).lstrip("-").replace("-", "_"))
        if dest in ("config", "output", "plugin", "help", "version", "local_rank"):
            raise UserError(f"{name}: {key}: must be typed, not in a file")
        if dest is None:
            raise UserError(f"{name}: unknown key {json.dumps(key)}{suggest(str(key), by_flag)}")
        if value is not None:
            values[dest] = value
    return values


def _of_run(record: dict, actions: dict[str, Action], config: Any, name: str) -> dict[str, Any]:
    """The values of a run's config.json, which has what the flags were resolved to."""
    kinds = {"stream": "pretraining", "task": "fine-tuning"}
    own = next(key for key in kinds if any(f.name == key for f in fields(config)))
    if own not in record:
        raise UserError(f"{name}: is of no {kinds[own]} run; must be")
    known = {f.name for f in fields(config)}
    if unknown := sorted(record.keys() - known - FACTS):
        raise UserError(
            f"{name}: unknown key {json.dumps(unknown[0])}{suggest(unknown[0], known)}; a run of "
            "another version has other keys: type its flags"
        )
    check_plugin(record, name)
    parts = ("model", "stream", "lengths", "head")
    nested = {key: v if isinstance(v := record.get(key), dict) else {} for key in parts}
    values = nested["model"] | nested["stream"] | record | (record.get("schedules") or {})
    try:
        values["learning_rate"] = record["deepspeed"]["optimizer"]["params"]["lr"]
    except (KeyError, TypeError):
        raise UserError(f'{name}: no "deepspeed.optimizer.params.lr" in it') from None
    log_line(
        f'{name}: of its block "deepspeed" the learning rate alone is taken; the rest is read from '
        "the file of --deepspeed_config, as it is now"
    )
    if own == "task":
        values["sequence_length"] = nested["lengths"].get("sequence")
        if nested["head"].get("dropout") != values.get("dropout"):
            del values["dropout"]  # two, which no flag says: those of the task
    if values.get("size") not in SIZES:
        values.pop("size", None)  # it names --init-from
    typed = ("output", "plugin")
    return {d: v for d, v in values.items() if d in actions and d not in typed and v is not None}


def _as_words(action: Action, value: Any) -> list[str]:
    """A value as it is typed."""
    flag = action.option_strings[0]
    is_switch = isinstance(action, _StoreTrueAction)
    if isinstance(value, dict) or is_switch != isinstance(value, bool):
        allowed = "true or false" if is_switch else "a value"
        raise UserError(f"{flag} {json.dumps(value)[:80]}: must be {allowed}")
    if is_switch:
        return [flag] * value
    words = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if action.nargs is None:
        return [f"{flag}={','.join(words)}"]
    return [flag, *words]


def _parse_yaml(content: bytes, name: str) -> dict:
    import yaml

    try:
        values = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(values, dict):
        raise UserError(f"{name}: must have a name and its value a line")
    return values
