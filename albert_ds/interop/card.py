"""The model card (README.md) of an exported Hugging Face folder.

It says what the run's files say, and marks what only a person knows with FILL IN: the licence where
none was typed, the language where the shards do not name it, and what the training emitted.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from albert_ds.data.vocab import Normalisation
from albert_ds.errors import UserError
from albert_ds.interop.hugging_face import list_groups
from albert_ds.json_files import read_json, read_lines
from albert_ds.model.config import HeadConfig, ModelConfig
from albert_ds.model.shapes import count_params
from albert_ds.model.sharing import ADDITIONS, read_additions

CARD = """---
{metadata}
---
# ALBERT, {made} with albert-ds

An ALBERT encoder (Lan et al., 2020){head}, exported from `{source}`.

```python
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = {auto}.from_pretrained("DIR")
```

## Model

| | |
| --- | --- |
| layers, hidden size, heads, feed-forward | {num_layers}, {hidden_size}, {num_heads}, {ffn_size} |
| vocabulary, embedding size | {vocab_size}, {embedding_size} |
| longest sequence | {max_position_embeddings} tokens |
| sharing between layers | `{sharing}`: {sharing_in_words} |
| of each layer's own | `{per_layer}`: {own_in_words} |
| parameters | {params:,}, of which {encoder:,} without the heads |
"""
NOTES = {
    "repeated": "Hugging Face shares whole layers in groups of neighbours only: what this model"
    " shares otherwise is repeated here, so this file is larger than the model.",
    "identity": "This model has no map from embedding to hidden size, which are equal. Hugging Face"
    " always has one: here it is an identity.",
    "no_pair_head": "It was pretrained without a sentence task: there are no weights for the"
    " pooler and the sentence head, and Hugging Face initialises both at random.",
}
# Kind of head -> (the class that loads it, the pipeline).
AUTO = {
    "classification": ("AutoModelForSequenceClassification", "text-classification"),
    "regression": ("AutoModelForSequenceClassification", "text-classification"),
    "choice": ("AutoModelForMultipleChoice", "multiple-choice"),
    "span": ("AutoModelForQuestionAnswering", "question-answering"),
}
# What stands at the top of the file, as a remark, where nobody has said it.
BLANKS = {
    "language": "FILL IN, for example [en]",
    "license": "FILL IN, for example apache-2.0",
    "model-index": "FILL IN: nothing was measured",
    "co2_eq_emissions": "FILL IN: emissions (grams), source, training_type, geographical_location,"
    " hardware_used",
}
LICENCE = """**FILL IN**, here and as `license:` at the top of this file. It depends on the text the
model was trained on, and only who publishes the model can say it."""
END = """## Carbon

Nothing of this is measured by albert-ds.

| | |
| --- | --- |
| emissions, grams of CO2 equivalent | **FILL IN** |
| hardware, and hours of its use | **FILL IN** |
| provider and region | **FILL IN** |

## Licence

{licence}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The exported weights and what lies beside them."""

    root: Path  # the run
    checkpoint: str  # the name of its checkpoint's folder; "" for a Hugging Face folder
    run: dict  # config.json of the run; empty for a Hugging Face folder
    normalisation: Normalisation
    command: str = ""  # that started the run, where config.json says it
    licence: str | None = None  # as Hugging Face spells it
    probes: tuple[dict, ...] = ()  # reports of tools/probe.py on these weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Numbers that were measured on one data set."""

    title: str
    data: str  # name of the data set
    facts: dict


def write_card(
    config: ModelConfig, head: HeadConfig | None, num_params: int, source: Source, checked: str
) -> str:
    """The card as Markdown; `checked` is the sentence about the comparison with Hugging Face."""
    parts = count_params(config)
    indexes = _read_indexes(source.run.get("data"))
    results = [result for result in _list_results(source, head) if result.facts]
    task = source.run.get("task") if head else None
    if head is None:
        auto = "AutoModelForPreTraining" if config.pair_head else "AutoModelForMaskedLM"
        pipeline = "fill-mask"
    else:
        auto, pipeline = AUTO[head.kind]
        task = task or head.kind
    metadata = {
        "language": sorted({x["language"] for x in indexes if x.get("language")}),
        "license": source.licence,
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        "tags": ["albert"],
        "model-index": _index_results(source.root.name, pipeline, results),
        "co2_eq_emissions": None,
    }
    text = CARD.format_map(
        {name: getattr(config, name) for name in config.__dataclass_fields__}
        | {
            "metadata": "\n".join(_write_field(*field) for field in metadata.items()),
            "auto": auto,
            "made": f"fine-tuned on {task}" if task else "pretrained",
            "head": f" with a head for {task}" if task else "",
            "source": "/".join(filter(None, (source.root.name, source.checkpoint))),
            "params": num_params,
            "encoder": sum(parts.values()) - parts["mlm_head"] - parts["pair_head"],
            "sharing_in_words": describe_sharing(config),
            "own_in_words": describe_own(config),
        }
    )
    sections = [
        text,
        *(f"{note}\n" for note in _list_notes(config, head)),
        f"{checked}\n",
        f"## Text\n\n{describe_normalisation(source.normalisation)}\n",
        _describe_training(source, head),
        _describe_data(source.run, indexes, head),
        *(
            _table(result.title, {k: _number(v) for k, v in result.facts.items()})
            for result in results
        ),
        END.format(licence=f"`{source.licence}`" if source.licence else LICENCE),
    ]
    return "\n".join(section for section in sections if section)


def _write_field(name: str, value) -> str:
    """A line of YAML, which JSON is; quoted, because `no` is a language there and not false."""
    return f"{name}: {json.dumps(value)}" if value else f"# {name}: {BLANKS[name]}"


def _index_results(name: str, pipeline: str, results: list[Result]) -> list[dict]:
    """The measured shares and scores in the form that the Hub reads."""
    found = [
        {
            "task": {"type": pipeline},
            "dataset": {"type": result.data, "name": result.title},
            "metrics": [
                {"type": key, "value": value}
                for key, value in result.facts.items()
                if isinstance(value, float)
            ],
        }
        for result in results
    ]
    return [{"name": name, "results": found}] if found else []


def _list_notes(config: ModelConfig, head: HeadConfig | None) -> list[str]:
    notes = [] if config.pair_head or head else [NOTES["no_pair_head"]]
    repeats = (len(set(blocks)) < len(blocks) for blocks in zip(*list_groups(config), strict=True))
    if any(repeats) or config.per_layer != "none":
        notes.append(NOTES["repeated"])
    if config.embedding_size == config.hidden_size:
        notes.append(NOTES["identity"])
    return notes


def describe_sharing(config: ModelConfig) -> str:
    """Which blocks the layers use, in words."""
    layers = config.num_layers
    words = []
    kinds = ("attention", "feed-forward")
    for kind, blocks in zip(kinds, zip(*config.plan, strict=True), strict=True):
        distinct = len(set(blocks))
        if distinct == 1:
            words.append(f"one {kind} block for all {layers} layers")
        elif distinct == layers:
            words.append(f"{layers} {kind} blocks, one a layer")
        else:
            order = ", ".join(map(str, blocks))
            words.append(f"{distinct} {kind} blocks, used by the layers in the order {order}")
    return "; ".join(words)


def describe_own(config: ModelConfig) -> str:
    """What each layer has beside the blocks it shares, in words."""
    found = [ADDITIONS[word].meaning for word in read_additions(config.per_layer)]
    return "; ".join(found) + " (folded into the layers' weights here)" if found else "nothing"


def describe_normalisation(normalisation: Normalisation) -> str:
    """What the tokenizer does to text before it looks for pieces."""
    case = "in lower case" if normalisation.lower_case else "with its case"
    accents = "kept" if normalisation.keep_accents else "removed (NFKD, then all combining marks)"
    unicode = "NFKC, without invisible characters" if normalisation.form == "nfkc" else "nmt_nfkc"
    return (
        f"The tokenizer reads text {case}; accents and combining marks are {accents}; Unicode is"
        f" normalised ({unicode}). Any white space counts as one blank; `` and '' become \"."
    )


def _describe_training(source: Source, head: HeadConfig | None) -> str:
    run = source.run
    stream, deepspeed = run.get("stream") or {}, run.get("deepspeed") or {}
    optimizer = deepspeed.get("optimizer") or {}
    halves = [name for name in ("bf16", "fp16") if deepspeed.get(name, {}).get("enabled")]
    versions = run.get("versions") or {}
    facts = {
        "task": run.get("task") if head else stream.get("objective"),
        "steps": run.get("steps"),
        "batch size": run.get("batch_size"),
        "optimizer": optimizer.get("type"),
        "peak learning rate": (optimizer.get("params") or {}).get("lr"),
        "warm-up steps": run.get("warmup_steps"),
        "longest sequence in training": stream.get("sequence_length"),
        "precision": (halves or ["fp32"])[0] if deepspeed else None,
        "seed": run.get("seed"),
        "started from": run.get("checkpoint") if head else run.get("init_from"),
        "albert-ds commit": versions.get("commit"),
        "torch": versions.get("torch"),
        "deepspeed": versions.get("deepspeed"),
    }
    section = _table("Training", facts)
    if source.command:
        section += "\nThe command, with files and folders by their names:\n\n"
        section += f"```bash\n{source.command}\n```\n"
    return section


def _describe_data(run: dict, indexes: list[dict], head: HeadConfig | None) -> str:
    folders = run.get("data") or []
    if head is not None or not isinstance(folders, list):
        return ""
    facts = {}
    weights = run.get("data_weights") or [1.0] * len(folders)
    for number, (folder, weight) in enumerate(zip(folders, weights, strict=False), start=1):
        index = next((x for x in indexes if x["folder"] == folder), None)
        words = [f"{weight:.1%} of the samples"]
        if index is None:
            words.append("its index.json could not be read at export")
        else:
            train = index["splits"]["train"]
            words += [f"{train[n]:,} {n}" for n in ("documents", "samples", "tokens") if n in train]
        facts[f"{number}. `{Path(folder).name}`"] = "; ".join(words)
    return _table("Data", facts)


def _list_results(source: Source, head: HeadConfig | None) -> list[Result]:
    if head is not None:
        dev = _read_object(source.root / "results.json").get("dev") or {}
        name = str(source.run.get("task", head.kind))
        return [Result(title="Development set", data=name, facts=dev)]
    step = source.checkpoint.removeprefix("step-")
    limit = int(step) if step.isdecimal() else 0
    metrics = source.root / "metrics.jsonl"
    entries = read_lines(metrics) if metrics.is_file() else []
    held_out = [x for x in entries if "heldout_mlm_loss" in x and x["step"] <= limit]
    last = held_out[-1] if held_out else {}
    facts = {k: v for k, v in last.items() if k.startswith("heldout_")}
    title = f"Held-out documents, at step {last.get('step')}"
    folders = source.run.get("data")
    names = [Path(folder).name for folder in folders] if isinstance(folders, list) else []
    data = ", ".join(names) or "unknown"
    return [
        Result(title=title, data=data, facts=facts),
        *(
            Result(
                title=f"Probe of {probe['data']}",
                data=probe["data"],
                facts={
                    k: v for k, v in probe.items() if isinstance(v, int | float) and k != "seconds"
                },
            )
            for probe in source.probes
        ),
    ]


def _table(title: str, facts: dict) -> str:
    rows = [f"| {name} | {fact} |" for name, fact in facts.items() if fact not in (None, "")]
    return "\n".join([f"## {title}", "", "| | |", "| --- | --- |", *rows, ""]) if rows else ""


def _number(value) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _read_indexes(folders) -> list[dict]:
    """index.json of every folder of shards that can be read here, with its folder."""
    folders = folders if isinstance(folders, list) else []
    found = [{**_read_object(Path(x) / "index.json"), "folder": x} for x in folders]
    return [index for index in found if "splits" in index]


def _read_object(path: Path) -> dict:
    """A JSON object; empty where there is none, as a card must not need the run's other files."""
    with suppress(UserError):
        return read_json(path)
    return {}
