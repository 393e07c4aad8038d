"""Accuracy of a checkpoint on held-out shards: masked tokens, sentence order, next sentence.

A model that was pretrained without one of the sentence tasks has no head for it; the tool then
trains that head alone, on pairs of the training shards (Table 5 of the paper). For comparison it
prints two baselines that need no model: the token that is masked most often, and a coin. Every
share has its 95 % confidence interval (Wilson). The loss of masked words is also given in bits per
UTF-8 byte of them, which compares models of different vocabularies. --similarity measures the L2
distance and the angle between the input and the output of every layer instead (Figure 1).

albert-ds probe --checkpoint RUN_OR_HF --data DATA
albert-ds probe --checkpoint ALBERT --against BERT --data DATA --similarity --output FILE
albert-ds plots layers --input FILE --output FILE.png
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from albert_ds import cli
from albert_ds.data.stream_config import list_pair_tasks
from albert_ds.errors import UserError
from albert_ds.files import write_file

TASKS = list_pair_tasks()


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="RUN_OR_HF",
        help="pretraining run, checkpoint or Hugging Face folder",
    )
    add(
        "--data",
        type=Path,
        metavar="DATA",
        help="folder with held-out shards (required without --minimal-pairs)",
    )
    add(
        "--minimal-pairs",
        type=Path,
        metavar="FOLDER",
        help="folder of *.jsonl with sentence_good and sentence_bad, to measure instead "
        "(default: none)",
    )
    text = "of the encoder with --minimal-pairs; bf16 is faster on processors with units for it"
    add("--precision", choices=("fp32", "bf16"), default="fp32", help=text)
    count: dict[str, Any] = {"type": cli.positive, "metavar": "SAMPLES"}
    add("--samples", default=4096, help="largest number of held-out samples", **count)
    add("--head-samples", default=8192, help="training samples for a missing head", **count)
    add("--micro-batch-size", default=8, help="samples of one forward pass", **count)
    add(
        "--sequence-length",
        type=cli.positive,
        metavar="TOKENS",
        help="longest sequence (default: that of the shards or of the model, the smaller)",
    )
    text = "layers to run, where they share all their blocks (default: the model's)"
    add("--num-layers", type=cli.positive, metavar="LAYERS", help=text)
    add("--seed", type=cli.natural, default=0, metavar="N", help="seed of masks and swaps")
    add("--output", type=cli.new_file, metavar="FILE", help="JSON file for the same numbers")
    add("--similarity", action="store_true", help="measure every layer instead (Figure 1)")
    add(
        "--against",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN_OR_HF",
        help="further checkpoints to measure with --similarity (default: none)",
    )
    add(
        "--labels",
        nargs="+",
        metavar="NAME",
        help="names of the models for --similarity (default: those of their folders)",
    )
    return parser


def open_model(checkpoint: Path, vocab, data: Path, device, num_layers: int | None):
    """A checkpoint's model on `device`; UserError where its vocabulary differs from the data's."""
    from albert_ds.interop.weights import check_vocab, read_model

    model = read_model(checkpoint)
    if vocab.size != model.config.vocab_size:
        raise UserError(
            f"--data {data}: its vocabulary has {vocab.size} pieces, that of {checkpoint} "
            f"{model.config.vocab_size}; they must be the same"
        )
    check_vocab(checkpoint, vocab, str(checkpoint))
    model.albert.encoder.set_depth(num_layers or model.config.num_layers)
    return model.to(device)


def find_objective(checkpoint: Path, has_head: bool) -> str:
    """The objective of a checkpoint's two-way head; ALBERT's SOP for a Hugging Face folder."""
    from albert_ds.interop.weights import find_weights
    from albert_ds.json_files import read_json

    config = read_json(find_weights(checkpoint)[0] / "config.json")
    objective = config.get("stream", {}).get("objective", "sop")
    return objective if has_head else "none"


def draw_batches(args, source, objective: str, samples: int, longest: int) -> list:
    """The first samples of a split, drawn for `objective`; every call draws the same ones."""
    from albert_ds.data.stream import heldout_batches
    from albert_ds.data.stream_config import StreamConfig

    length = min(source.sequence_length, longest, args.sequence_length or longest)
    return list(
        heldout_batches(
            source,
            StreamConfig(objective=objective, sequence_length=length, seed=args.seed),
            limit=samples,
            micro_batch_size=args.micro_batch_size,
            dp_rank=0,
            dp_size=1,
        )
    )


def probe(args, device) -> dict:
    """Held-out accuracies and their baselines."""
    import torch

    from albert_ds.data.shards import open_shards
    from albert_ds.evals.frozen import encode_pairs, train_head
    from albert_ds.evals.heldout import evaluate
    from albert_ds.parallel.mesh import build_mesh

    source = open_shards(args.data, "heldout")
    model = open_model(args.checkpoint, source.vocab, args.data, device, args.num_layers)
    longest = model.config.max_position_embeddings
    own = find_objective(args.checkpoint, model.config.pair_head)
    batches = draw_batches(args, source, own, args.samples, longest)
    values = evaluate(model, batches, build_mesh(1), device, own)
    for task in TASKS.keys() - {own}:
        held, labels = encode_pairs(
            model, draw_batches(args, source, task, args.samples, longest), device
        )
        shards = open_shards(args.data, "train")
        train = draw_batches(args, shards, task, args.head_samples, longest)
        features, known = encode_pairs(model, train, device)
        values[f"heldout_{task}_pairs"] = len(labels)
        if not len(labels) or len({*known.tolist()}) < 2:
            cli.log_line(
                f"{task} accuracy is not measured: its head needs training pairs of both labels "
                f"and held-out pairs; {len(known)} and {len(labels)} could be made of {args.data}"
            )
            continue
        values[f"heldout_{task}_accuracy"] = float(
            (train_head(features, known, held) == labels).mean()
        )
    masked = torch.cat([torch.as_tensor(b.tensors["masked_labels"]) for b in batches])
    frequent = masked.mode().values
    loss, count = values["heldout_mlm_loss"], values["heldout_masked"]
    assert loss is not None and count, "every sample has a masked token"
    size = torch.tensor(source.vocab.count_bytes())[masked].sum()
    return {
        **values,
        "heldout_bits_per_byte": loss * count / math.log(2) / float(size),
        "objective": own,
        "most_frequent_piece": source.vocab.pieces[int(frequent)],
        "most_frequent_share": float((masked == frequent).double().mean()),
    }


def as_table(values: dict) -> str:
    masked, piece = values["heldout_masked"], values["most_frequent_piece"]
    rows = [
        ("MLM accuracy", values["heldout_mlm_accuracy"], masked),
        (f"always guessing {piece!r}", values["most_frequent_share"], masked),
    ]
    for task, name in TASKS.items():
        count = values.get(f"heldout_{task}_pairs", values["heldout_pairs"])
        accuracy = values.get(f"heldout_{task}_accuracy")
        label = f"{name} accuracy"
        if task != values["objective"]:
            label += ", only its head trained"
        if count and accuracy is not None:
            rows.append((label, accuracy, count))
    rows.append(("a coin", 0.5, None))
    lines = ["| held out | share | 95 % interval | of |", "| --- | --- | --- | --- |"]
    for name, share, count in rows:
        low, high = interval(share, count) if count else (share, share)
        lines.append(f"| {name} | {share:.4f} | {low:.4f} .. {high:.4f} | {count or ''} |")
    bits = values["heldout_bits_per_byte"]
    return "\n".join([*lines, "", f"{bits:.3f} bits per byte of masked words"])


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share of `count` trials."""
    from scipy.stats import binomtest

    found = binomtest(round(share * count), count).proportion_ci(0.95, method="wilson")
    return found.low, found.high


def probe_pairs(args, device) -> dict:
    """Accuracy on minimal pairs, with the published models' on the same paradigms."""
    import torch

    from albert_ds.evals import minimal_pairs
    from albert_ds.interop.weights import read_model, read_model_vocab

    pairs = minimal_pairs.read_pairs(args.minimal_pairs)
    published = minimal_pairs.read_published(args.minimal_pairs)
    model, vocab = read_model(args.checkpoint).to(device), read_model_vocab(args.checkpoint)
    if args.precision == "bf16":
        model.albert.to(torch.bfloat16)
    started = time.perf_counter()
    values = minimal_pairs.summarise(pairs, minimal_pairs.score_pairs(model, vocab, pairs, device))
    seconds = time.perf_counter() - started
    for name, scores in published.items():
        found = [scores[paradigm] for paradigm in values["paradigms"] if paradigm in scores]
        if len(found) == len(values["paradigms"]):
            values.setdefault("published", {})[name] = sum(found) / len(found)
    return {**values, "precision": args.precision, "seconds": seconds}


def tabulate_pairs(values: dict) -> str:
    lines = ["| minimal pairs | accuracy | 95 % interval | of |", "| --- | --- | --- | --- |"]
    rows = [*values["paradigms"].items(), *values["phenomena"].items()]
    for name, (share, count) in [*rows, ("**all**", (values["accuracy"], values["pairs"]))]:
        low, high = interval(share, count)
        lines.append(f"| {name} | {share:.4f} | {low:.4f} .. {high:.4f} | {count} |")
    lines += [
        f"| {name}, published | {s:.4f} | | |" for name, s in values.get("published", {}).items()
    ]
    speed = values["pairs"] / values["seconds"]
    return "\n".join(
        [*lines, "| a coin | 0.5000 | | |", "", f"{speed:,.0f} pairs/s, {values['precision']}"]
    )


def compare_layers(args, device) -> dict:
    """The numbers of Figure 1 by label, for every checkpoint on the same held-out samples."""
    from albert_ds.data.shards import open_shards
    from albert_ds.evals.frozen import measure_similarity

    checkpoints = [args.checkpoint, *args.against]
    labels = args.labels or [checkpoint.name for checkpoint in checkpoints]
    if len({*labels}) != len(checkpoints):
        raise UserError(f"--labels {' '.join(labels)}: must be {len(checkpoints)} different names")
    source, found = open_shards(args.data, "heldout"), {}
    for label, checkpoint in zip(labels, checkpoints, strict=True):
        model = open_model(checkpoint, source.vocab, args.data, device, args.num_layers)
        longest = model.config.max_position_embeddings
        batches = draw_batches(args, source, "none", args.samples, longest)
        measured = measure_similarity(model, batches, device)
        found[label] = {"sharing": model.config.sharing, **measured}
    return {"models": found}


def name_measured(args) -> dict[str, str]:
    """What the numbers are of and on which data: a model card takes them for the same weights."""
    from albert_ds.interop.weights import name_weights

    layers = f", {args.num_layers} layers" if args.num_layers else ""
    data = args.data or args.minimal_pairs
    return {"weights": name_weights(args.checkpoint) + layers, "data": data.resolve().name}


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if (args.against or args.labels) and not args.similarity:
        raise UserError("--against and --labels: allowed only with --similarity")
    if args.num_layers and args.minimal_pairs:
        raise UserError("--num-layers: allowed only with --data")
    if args.precision != "fp32" and not args.minimal_pairs:
        raise UserError("--precision: allowed only with --minimal-pairs")
    if (args.data is None) == (args.minimal_pairs is None):
        raise UserError("--data and --minimal-pairs: one of them is needed, and not both")
    from albert_ds.process.quiet import quiet_libraries
    from albert_ds.process.rendezvous import join_world
    from albert_ds.process.world import read_world

    quiet_libraries()
    device = join_world(read_world())
    if args.minimal_pairs:
        values = probe_pairs(args, device)
        table = tabulate_pairs(values)
    elif args.similarity:
        values = compare_layers(args, device)
        table = json.dumps(values, indent=1)
    else:
        values = probe(args, device)
        table = as_table(values)
    print(table)
    if args.output:
        if not args.similarity:
            values = {**name_measured(args), **values}
        write_file(args.output, json.dumps(values, indent=1) + "\n")
