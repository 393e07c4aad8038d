"""The model card (README.md) of an exported Hugging Face folder; its text is `card.jinja`.

It says what the run's files say, and marks what only a person knows with FILL IN: the licence if
none was typed, the language if the shards do not name it, and what the training emitted.
"""

import json
from contextlib import suppress
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from albert_ds.base.errors import UserError
from albert_ds.base.json_files import read_json, read_lines
from albert_ds.checkpoint.folder import BEST
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.checkpoint.origin import find_base, find_languages
from albert_ds.engine.deepspeed_config import precision_of
from albert_ds.model.config import ModelConfig
from albert_ds.model.hugging_face import ENCODER, Weights, list_groups

TEXT = Path(__file__).with_name("card.jinja")


def write_card(
    folder: ModelFolder,
    config: ModelConfig,
    state: Weights,
    architecture: str,
    trained_length: int,
    licence: str | None,
    probes: list[dict],
    checked: str,
) -> str:
    """The card as Markdown, for the weights `state` of `config`, which are those of a folder.

    `architecture` is the class of Hugging Face that loads them, `probes` are reports of `albert-ds
    probe` on them, `checked` is the sentence about the comparison with Hugging Face.
    """
    head = folder.head
    run = folder.record if folder.is_ours else {}
    shards = run.get("data") or () if head is None else ()
    records = {data: _read_object(Path(data) / "index.json") for data in shards}
    indexes = {data: index for data, index in records.items() if "splits" in index}
    results = _list_results(folder, run, probes)
    hugging_face = head.row.hugging_face if head else None
    pipeline = hugging_face.pipeline if hugging_face else "fill-mask"
    groups = list_groups(config)
    repeats = (len(set(blocks)) < len(blocks) for blocks in zip(*groups, strict=True))
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["plain"] = as_plain
    environment.filters["json"] = json.dumps  # YAML too; `no` in quotes is a language, not false
    return environment.from_string(TEXT.read_text(encoding="utf-8")).render(
        metadata={
            "language": sorted(find_languages(folder, {})),
            "license": licence,
            **({"base_model": base} if (base := find_base(run)) else {}),
            "library_name": "transformers",
            "pipeline_tag": pipeline,
            "tags": ["albert"],
            "model-index": _index_results(folder, pipeline, results),
        },
        task=run.get("task", head.kind) if head else None,
        source=folder.name,
        auto=architecture.replace("Albert", "AutoModel"),
        config=config,
        trained_length=trained_length,
        num_params=sum(x.numel() for x in state.values()),
        num_encoder=sum(x.numel() for name, x in state.items() if name.startswith(ENCODER)),
        is_repeated=any(repeats) or config.per_layer != "none",
        checked=checked,
        text=folder.vocab.normalisation,
        tables=[
            ("Training", _describe_training(run, is_task=head is not None)),
            ("Data", _describe_data(run, indexes) if head is None else {}),
            *((title, facts) for title, _, facts in results),
        ],
        command=run.get("command"),
        licence=licence,
    )


def as_plain(fact: object) -> str:
    """Text of a run's files, or a name, as Markdown and HTML show it: no tag, no cell, one line."""
    text = " ".join(str(fact).split())
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _describe_training(run: dict, *, is_task: bool) -> dict:
    stream, deepspeed = run.get("stream") or {}, run.get("deepspeed") or {}
    optimizer, versions = deepspeed.get("optimizer") or {}, run.get("versions") or {}
    changing = run.get("schedules") or {}
    starts = map(run.get, ("from_task", "checkpoint", "init_from"))
    facts = {
        "task": run.get("task") if is_task else stream.get("objective"),
        "steps": run.get("steps"),
        "batch size": changing.get("batch_size", run.get("batch_size")),
        "optimizer": optimizer.get("type"),
        "peak learning rate": (optimizer.get("params") or {}).get("lr"),
        "warm-up steps": run.get("warmup_steps"),
        "longest sequence in training": changing.get(
            "sequence_length", stream.get("sequence_length")
        ),
        "masked share of the tokens": changing.get("masked_fraction"),
        "precision": precision_of(deepspeed) if deepspeed else None,
        "seed": run.get("seed"),
        "started from": None if run.get("from_scratch") else next(filter(None, starts), None),
        "albert-ds commit": versions.get("commit"),
        "torch": versions.get("torch"),
        "deepspeed": versions.get("deepspeed"),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _describe_data(run: dict, indexes: dict[str, dict]) -> dict[str, str]:
    facts = {}
    folders = run.get("data") or []
    weights = run.get("data_weights") or [1.0] * len(folders)
    for number, (folder, weight) in enumerate(zip(folders, weights, strict=False), start=1):
        words = [f"{weight:.1%} of the samples"]
        if folder in indexes:
            train = indexes[folder]["splits"]["train"]
            words += [f"{train[n]:,} {n}" for n in ("documents", "samples", "tokens") if n in train]
        else:
            words.append("its index.json could not be read at export")
        facts[f"{number}. `{Path(folder).name}`"] = "; ".join(words)
    return facts


def _list_results(
    folder: ModelFolder, run: dict, probes: list[dict]
) -> list[tuple[str, str, dict]]:
    """What was measured, each as (title, name of the data set, numbers).

    Training measures no averaged weights, and of a fine-tuned model it scores the best ones.
    """
    is_trained = folder.checkpoint is not None and not folder.average and folder.average_last == 1
    weights = folder.checkpoint.path.name if is_trained else ""
    if folder.head is not None:
        best = _read_object(folder.root / "results.json") if weights == BEST.name else {}
        title = f"Development set, at step {best.get('best_step')}"
        return [(title, str(run.get("task", folder.head.kind)), best.get("dev") or {})]
    results = []
    metrics = folder.root / "metrics.jsonl"
    step = weights.removeprefix("step-")
    if step.isdecimal() and metrics.is_file():
        for line in read_lines(metrics):
            if "heldout_mlm_loss" in line and line["step"] <= int(step):
                facts = {k: v for k, v in line.items() if k.startswith("heldout_")}
                data = Path((run.get("data") or ["unknown"])[0]).name  # the one that is evaluated
                results = [(f"Held-out documents, at step {line['step']}", data, facts)]
    for probe in probes:
        numbers = {k: v for k, v in probe.items() if isinstance(v, int | float) and k != "seconds"}
        results.append((f"Probe of {probe['data']}", probe["data"], numbers))
    return results


def _index_results(folder: ModelFolder, pipeline: str, results: list) -> list[dict]:
    """The measured shares and scores in the form that the Hub reads."""
    entries = [
        {
            "task": {"type": pipeline},
            "dataset": {"type": data, "name": title},
            "metrics": [
                {"type": key, "value": value}
                for key, value in facts.items()
                if isinstance(value, float)
            ],
        }
        for title, data, facts in results
        if facts
    ]
    return [{"name": folder.root.resolve().name, "results": entries}] if entries else []


def _read_object(path: Path) -> dict:
    """A JSON object; empty if there is none, as a card must not need the run's other files."""
    with suppress(UserError):
        return read_json(path)
    return {}
