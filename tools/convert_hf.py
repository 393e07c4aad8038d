"""Checkpoints to Hugging Face folders, and back.

    python tools/convert_hf.py export --checkpoint RUN --output DIR
    python tools/convert_hf.py import --input DIR --output CKPT

DIR loads offline with AutoModel, AutoModelForPreTraining, AutoModelForMaskedLM and AutoTokenizer;
logits and ids are those of this project. A fine-tuned model loads as what it is: for sequence
classification, multiple choice or question answering (SQuAD 1.1). CKPT works wherever a checkpoint
is asked for.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from albert_ds.data.vocab import read_vocab
from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser
from albert_ds.interop import OURS, THEIRS, locate, read_json, read_ours, read_weights, to_hf
from albert_ds.model.arithmetic import count_params
from albert_ds.model.config import ModelConfig
from albert_ds.model.head_config import HeadConfig
from albert_ds.model.hugging_face_tasks import task_to_hf

CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags: [albert]
---
# ALBERT, {made} with albert-ds

An ALBERT encoder (Lan et al., 2020){head}, exported from `{source}`.

| | |
| --- | --- |
| layers, hidden size, heads, feed-forward | {num_layers}, {hidden_size}, {num_heads}, {ffn_size} |
| vocabulary, embedding size | {vocab_size}, {embedding_size} |
| longest sequence | {max_position_embeddings} tokens |
| sharing between layers | `{sharing}` |
| parameters | {params:,}, of which {encoder:,} without the heads |

```python
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = {auto}.from_pretrained("DIR")
```
"""
NOTES = {
    "partial": "Hugging Face shares whole layers only: what this model shares between layers is"
    " repeated here for each of them, so this file is larger than the model.",
    "identity": "This model has no map from embedding to hidden size, which are equal; Hugging Face"
    " always has one, here an identity.",
    "no_pair_head": "It was pretrained without a sentence task: there are no weights for the"
    " pooler and the sentence head, and what Hugging Face starts there is random.",
}
# Kind of head -> (what loads it, what it is for).
AUTO = {
    "classification": ("AutoModelForSequenceClassification", "text-classification"),
    "regression": ("AutoModelForSequenceClassification", "text-classification"),
    "choice": ("AutoModelForMultipleChoice", "multiple-choice"),
    "span": ("AutoModelForQuestionAnswering", "question-answering"),
}


def export_hf(checkpoint: Path, output: Path) -> None:
    """Write a run or checkpoint as a Hugging Face folder."""
    from safetensors.torch import save_file

    root, weights = locate(checkpoint)
    if weights.name == OURS:
        config, head, state = read_ours(checkpoint)
    else:
        (config, state), head = read_weights(checkpoint), None
    if head is None:
        hf_config, hf_state = to_hf(config, state)
    else:
        hf_config, hf_state = task_to_hf(config, head, state, f"--checkpoint {checkpoint}")
    vocab = read_vocab(root / "spiece.model")
    _require_size(vocab.size, config, root)
    _make_folder(output)
    vocab.write(output)
    # Else AlbertTokenizer neither tells segments A and B apart nor knows where to cut.
    tokenizer = read_json(output / "tokenizer_config.json")
    tokenizer["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer["model_max_length"] = config.max_position_embeddings
    _write_json(output / "tokenizer_config.json", tokenizer)
    _write_json(output / "config.json", hf_config)
    # Shared blocks are one tensor under several names, which the format does not take.
    copies = {name: tensor.clone() for name, tensor in hf_state.items()}
    save_file(copies, output / THEIRS[0], metadata={"format": "pt"})
    source = f"{root.name}/{weights.parent.name}"
    if head is None:
        card = write_card(config, source)
    else:
        task = read_json(root / "config.json").get("task", head.kind)
        num_params = sum(tensor.numel() for tensor in state.values())
        card = write_task_card(config, head, source, task, num_params)
    (output / "README.md").write_text(card, encoding="utf-8")


def import_hf(folder: Path, output: Path) -> None:
    """Write a Hugging Face folder as a checkpoint of this project, at step 0."""
    from safetensors.torch import save_file

    config, state = read_weights(folder)
    vocab = read_vocab(folder / "spiece.model")
    _require_size(vocab.size, config, folder)
    _make_folder(output)
    vocab.write(output)
    _write_json(output / "config.json", {"model": asdict(config)})
    step = output / "checkpoints" / "step-00000000"
    step.mkdir(parents=True)
    save_file(state, step / OURS)
    (step.parent / "latest").write_text(step.name + "\n")


def write_card(config: ModelConfig, source: str) -> str:
    """The card of a pretrained model: what it is, and what its export had to write differently."""
    facts = {
        "auto": "AutoModelForPreTraining" if config.pair_head else "AutoModelForMaskedLM",
        "pipeline": "fill-mask",
        "made": "pretrained",
        "head": "",
        "params": sum(count_params(config).values()),
        "source": source,
    }
    notes = [] if config.pair_head else [NOTES["no_pair_head"]]
    return _fill_card(config, facts, notes)


def write_task_card(
    config: ModelConfig, head: HeadConfig, source: str, task: str, num_params: int
) -> str:
    """The card of a model fine-tuned on `task`."""
    auto, pipeline = AUTO[head.kind]
    facts = {
        "auto": auto,
        "pipeline": pipeline,
        "made": f"fine-tuned on {task}",
        "head": f" with a head for {task}",
        "params": num_params,
        "source": source,
    }
    return _fill_card(config, facts, [])


def _fill_card(config: ModelConfig, facts: dict, notes: list[str]) -> str:
    parts = count_params(config)
    if config.sharing in ("attention", "ffn"):
        notes.append(NOTES["partial"])
    if config.embedding_size == config.hidden_size:
        notes.append(NOTES["identity"])
    encoder = sum(parts.values()) - parts["mlm_head"] - parts["pair_head"]
    card = CARD.format(**asdict(config), encoder=encoder, **facts)
    return "\n".join([card, *(f"{note}\n" for note in notes)])


def _require_size(found: int, config: ModelConfig, root: Path) -> None:
    if found != config.vocab_size:
        raise UserError(
            f"{root / 'spiece.model'} has {found} pieces, the model's vocab_size is "
            f"{config.vocab_size}"
        )


def _make_folder(output: Path) -> None:
    if (output / "checkpoints").exists():
        raise UserError(f"--output {output}: holds checkpoints; name another folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from None
    if not os.access(output, os.W_OK):
        raise UserError(f"--output {output}: may not be written to")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def build_parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="a run or checkpoint -> a Hugging Face folder")
    add = export.add_argument
    add("--checkpoint", required=True, type=Path, metavar="RUN", help="run (its newest checkpoint)")
    add("--output", required=True, type=Path, metavar="DIR", help="Hugging Face folder to write")
    add = commands.add_parser("import", help="a Hugging Face folder -> a checkpoint").add_argument
    add("--input", required=True, type=Path, metavar="DIR", help="Hugging Face folder to read")
    add("--output", required=True, type=Path, metavar="CKPT", help="checkpoint folder to write")
    return parser


def main(argv: list[str] | None = None) -> int:
    try:
        args = build_parser().parse_args(argv)
        if args.command == "export":
            export_hf(args.checkpoint, args.output)
        else:
            import_hf(args.input, args.output)
    except ENDINGS as ending:
        print(ending, file=sys.stderr)
        return ending.code
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
