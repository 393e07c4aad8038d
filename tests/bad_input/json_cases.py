"""Every file of JSON that the product reads, with wrong values at every place in it."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from albert_ds.base.errors import DamagedData
from tests.conftest import ROOT

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 7, 1.5, 10**30, 1e308, -1e308, "", "auto", "x", "\u0000"),
    *([], {}, [[]], ["x"], [1], {"a": 1}, {"type": "x"}),
)
MARK = "@here@"
REMOVED = object()
# Never JSON of finite numbers and different keys, whatever the schema.
NEVER = (
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 400,
    "[" * 40 + "]" * 40,
    '{"a": 1, "a": 2}',
    "\x00",
)
BYTES = (
    *(b"", b"\0", b"\xff\xfe{\0}\0", b"null", b"[]", b"[{}]", b'"x"', b"3", b"{", b"{}"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"a": "\\ud800"}', b'{"a": 1}{}', b"\xef\xbb\xbf{}"),
)


class Reader(NamedTuple):
    """A file as it is written, and what reads it.

    `is_bound` tells for which places in it a value of another kind must be refused; others are for
    people, or are compared and not used.
    """

    whole: dict
    path: Path
    read: Callable[[], object]
    is_bound: Callable[[tuple], bool] = lambda path: False


def list_paths(value, at=()) -> Iterator[tuple]:
    """The keys that lead to each value within `value`."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value[:3]) if isinstance(value, list) else items
    for key, inner in items:
        yield (*at, key)
        yield from list_paths(inner, (*at, key))


def change(reader: Reader, path: tuple, value: Any) -> tuple[bytes, bool]:
    """The file with another value at a path, or with none; whether it must be refused."""
    changed = copy.deepcopy(reader.whole)
    holder = reduce(getitem, path[:-1], changed)
    original = holder[path[-1]]
    is_text = value in NEVER
    holder[path[-1]] = MARK if is_text else value
    if value is REMOVED:
        del holder[path[-1]]
    text = json.dumps(changed)
    if is_text:
        return text.replace(f'"{MARK}"', value).encode(), True
    is_other = value is not REMOVED and _is_other_kind(original, value)
    return text.encode(), is_other and reader.is_bound(path)


def _is_other_kind(original, value) -> bool:
    """Whether `value` can never stand where `original` does; null and "auto" may."""
    if value in (None, "auto"):
        return False
    kinds = (bool, (int, float), str, list, dict)

    def kind(x):
        return next(number for number, each in enumerate(kinds) if isinstance(x, each))

    return original not in (None, "auto") and kind(original) != kind(value)


def make_readers(folder: Path, data: Path) -> dict[str, Reader]:
    """Name -> reader; `data` is a built folder, `folder` an empty one to work in."""
    readers = {**_configurations(folder, data), **_results(folder), **_tasks(folder)}
    for reader in readers.values():
        if not reader.path.exists():
            reader.path.write_text(json.dumps(reader.whole))
        reader.read()  # as it is written it is accepted
    return readers


def _configurations(folder: Path, data: Path) -> dict[str, Reader]:
    import shutil

    from safetensors.torch import save_file

    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.data.shards import open_shards
    from albert_ds.engine.deepspeed_config import read_ds_config
    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.model.hugging_face import build_hf_config, to_hf
    from albert_ds.model.task_heads import AlbertForTask, HeadConfig
    from albert_ds.settings.shared import read_previous
    from albert_ds.vocab.tokenizer_json import read_tokenizer_json
    from albert_ds.vocab.vocab import read_vocab
    from tests.models import write_weights
    from tests.runs import SMALL

    own, native, hf, run = (folder / name for name in ("data", "native", "hf", "run"))
    shutil.copytree(data, own)
    for made in (hf, run):
        made.mkdir(parents=True)
    head = HeadConfig(kind="classification", num_labels=2)
    write_weights(native, AlbertForTask(SMALL, head, seed=0).state_dict(), None)
    hf_config, weights = to_hf(SMALL, AlbertForPretraining(SMALL, seed=0).state_dict())
    save_file(weights, hf / "model.safetensors")
    used = {"model_type", "vocab_size", "embedding_size", "hidden_size", "num_hidden_layers"}
    used |= {"num_attention_heads", "intermediate_size", "layer_norm_eps", "num_hidden_groups"}
    vocab = open_shards(own, "train").vocab
    vocab.build_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    index = json.loads((own / "index.json").read_text())
    of_index = {"format", "splits", "sequence_length", "token_dtype", "vocab_sha256", "segmented"}
    shipped = json.loads((ROOT / "ds_configs" / "zero1_bf16.json").read_text())
    started = {"stream": {"objective": "sop"}, "warmup_steps": 3, "deepspeed": shipped}
    return {
        "DeepSpeed's JSON": Reader(
            shipped,
            folder / "ds.json",
            lambda: read_ds_config(folder / "ds.json"),
            lambda path: not path[0].endswith(("_batch_size", "_per_gpu", "_accumulation_steps")),
        ),
        "index.json": Reader(
            index,
            own / "index.json",
            lambda: open_shards(own, "train"),
            lambda path: path[0] in of_index,
        ),
        "config.json of a run": Reader(
            started, run / "config.json", lambda: read_previous(run), lambda p: len(p) == 1
        ),
        "config.json of weights": Reader(
            {"model": asdict(SMALL), "head": {**asdict(head), "labels": ["a", "b"]}},
            native / "config.json",
            lambda: ModelFolder(native).read_weights(),
            lambda path: True,
        ),
        "config.json of Hugging Face": Reader(
            {**build_hf_config(SMALL, "AlbertForPreTraining"), **hf_config},
            hf / "config.json",
            lambda: ModelFolder(hf).read_weights(),
            lambda path: path[0] in used,
        ),
        "tokenizer_config.json": Reader(
            json.loads((own / "tokenizer_config.json").read_text()),
            own / "tokenizer_config.json",
            lambda: read_vocab(own / "spiece.model"),
            lambda path: path[0] in ("normalization", "keep_accents", "do_lower_case"),
        ),
        "tokenizer.json": Reader(
            tokenizer,
            folder / "tokenizer.json",
            lambda: read_tokenizer_json(folder / "tokenizer.json"),
            lambda path: path[0] == "model" and path[1:2] == ("vocab",),
        ),
    }


def _results(folder: Path) -> dict[str, Reader]:
    from types import SimpleNamespace

    from albert_lab.plots import read_models
    from albert_lab.tables import read_report

    from albert_ds.settings.finetune import find_task_model
    from albert_ds.text.manifest import Piece, read_note
    from tools.lab.paper_table import read_cell, read_lead

    raw = ROOT / "docs" / "raw"
    table = folder / "table"
    (table / "rte").mkdir(parents=True)
    measured = json.loads((raw / "bench_base_2.json").read_text())
    similarity = json.loads((raw / "figure1.json").read_text())
    statistics = dict.fromkeys(("median", "mean", "std", "min", "max"), 0.5)
    results = {"task": "glue/rte", "best_seed": None, "dev": {"accuracy": statistics}}
    accuracies = {f"heldout_{name}_accuracy": 0.5 for name in ("mlm", "nsp", "sop")}
    notes = folder / "notes"
    notes.mkdir()
    args = SimpleNamespace(from_task=str(table / "rte"), output=str(folder / "out"))
    report, layers = (folder / f"{name}.json" for name in ("report", "layers"))

    def read_finished():
        note = read_note(Piece(notes / "unit-000000.json", "x", None, 0))
        if not isinstance(note, dict):
            raise DamagedData("the piece of work is done again")
        return note

    return {
        "results.json": Reader(
            results,
            table / "rte" / "results.json",
            lambda: (read_cell(table, "glue/rte"), find_task_model(args)),
            lambda path: path == ("task",) or path[2:3] == ("median",),
        ),
        "probe.json": Reader(
            accuracies, table / "probe.json", lambda: read_lead(table), lambda path: True
        ),
        "reports of benchmarks": Reader(measured, report, lambda: read_report(report)),
        "layers of models": Reader(
            similarity,
            layers,
            lambda: read_models(layers),
            lambda path: path == ("models",) or path[2:3] in [("l2",), ("degrees",)],
        ),
        "note of a build": Reader(
            {"identity": "x", "files": {}, "counts": {"documents": 1}},
            notes / "unit-000000.json",
            read_finished,
        ),
    }


def _tasks(folder: Path) -> dict[str, Reader]:
    from albert_ds.tasks.race import read_passage
    from albert_ds.tasks.squad.dataset import read_squad

    answer = {"text": "b", "answer_start": 2}
    question = {"id": "q", "question": "?", "answers": [answer], "is_impossible": False}
    squad = {"data": [{"paragraphs": [{"context": "a b c", "qas": [question]}]}]}
    race = {
        "article": "a",
        "questions": ["_?", "b"],
        "options": [["a", "b", "c", "d"]] * 2,
        "answers": ["A", "D"],
    }
    return {
        "SQuAD": Reader(
            squad,
            folder / "squad.json",
            lambda: list(read_squad(folder / "squad.json", answerable=False)),
            lambda path: True,
        ),
        "RACE": Reader(
            race, folder / "race.txt", lambda: read_passage(folder / "race.txt"), lambda path: True
        ),
    }
