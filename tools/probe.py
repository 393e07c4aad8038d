"""Accuracy of a checkpoint on held-out shards: masked words, order of segments, next segments.

Whatever it was pretrained for: where a model never had the two-way head of a sentence task, that
head alone is trained, on pairs of the training shards (Table 5). Beside the shares stands what
needs no model, the token that is masked most often and a coin; each has its 95 % confidence
interval (Wilson). --similarity measures how far every layer moves its input (Figure 1).

python tools/probe.py --checkpoint RUN_OR_HF --data DATA
python tools/probe.py --checkpoint ALBERT --against BERT --data DATA --similarity --output FILE
python tools/plots.py layers --input FILE --output FILE.png
"""

import argparse
import json
import sys
from pathlib import Path

from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser, natural, positive
from albert_ds.runtime.ending import say

TASKS = {"sop": "SOP", "nsp": "NSP"}


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/probe.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="RUN_OR_HF", help="run or HF folder")
    add("--data", type=Path, required=True, help="built folder with held-out shards")
    add("--samples", type=positive, default=4096, help="held-out samples at most")
    add("--head-samples", type=positive, default=8192, help="training samples for a missing head")
    add("--micro-batch-size", type=positive, default=8, help="samples a pass")
    add(
        "--sequence-length",
        type=positive,
        help="longest sequence (default: as built, or pretrained)",
    )
    add("--seed", type=natural, default=0, help="of masks and swaps")
    add("--output", type=Path, help="JSON with the same numbers")
    add("--similarity", action="store_true", help="L2 distance and angle of each layer instead")
    add("--against", type=Path, nargs="+", default=[], help="checkpoints to measure beside it")
    add("--labels", nargs="+", help="names of the models (default: the folders')")
    return parser


def open_model(checkpoint: Path, vocab_size: int, data: Path, device):
    """A checkpoint's model on `device`; UserError where its vocabulary is not that of the data."""
    import torch

    from albert_ds.interop import read_weights
    from albert_ds.model.albert import AlbertForPretraining

    config, weights = read_weights(checkpoint)
    if vocab_size != config.vocab_size:
        raise UserError(
            f"--data {data}: its vocabulary has {vocab_size} pieces, that of {checkpoint} "
            f"{config.vocab_size}; they must be the same"
        )
    with torch.device("meta"):
        model = AlbertForPretraining(config)
    model.load_state_dict(weights, assign=True)
    return model.to(device)


def find_objective(checkpoint: Path, has_head: bool) -> str:
    """What a checkpoint's two-way head was trained for; of a Hugging Face folder: ALBERT's SOP."""
    from albert_ds.interop import locate, read_json

    config = read_json(locate(checkpoint)[0] / "config.json")
    objective = config.get("stream", {}).get("objective", "sop")
    return objective if has_head else "none"


def draw_batches(args, source, objective: str, samples: int, longest: int) -> list:
    """The first samples of a split as `objective` draws them, the same at every call."""
    from albert_ds.data.samples import StreamConfig
    from albert_ds.data.stream import heldout_batches

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
    """Held-out accuracies with their baselines, as plain numbers."""
    import torch

    from albert_ds.data.shards import open_shards
    from albert_ds.evals.heldout import evaluate
    from albert_ds.evals.sentence_pairs import encode_pairs, train_head
    from albert_ds.parallel.mesh import build_mesh

    source = open_shards(args.data, "heldout")
    model = open_model(args.checkpoint, source.vocab.size, args.data, device)
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
        right = train_head(*encode_pairs(model, train, device), held) == labels
        values[f"heldout_{task}_accuracy"] = float(right.mean())
        values[f"heldout_{task}_pairs"] = len(labels)
    masked = torch.cat([torch.as_tensor(b.tensors["masked_labels"]) for b in batches])
    frequent = masked.mode().values
    return {
        **values,
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
        label = f"{name} accuracy"
        if task != values["objective"]:
            label += ", only its head trained"
        if count:
            rows.append((label, values[f"heldout_{task}_accuracy"], count))
    rows.append(("a coin", 0.5, None))
    lines = ["| held out | share | 95 % interval | of |", "| --- | --- | --- | --- |"]
    for name, share, count in rows:
        low, high = interval(share, count) if count else (share, share)
        lines.append(f"| {name} | {share:.4f} | {low:.4f} .. {high:.4f} | {count or ''} |")
    return "\n".join(lines)


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share of `count` trials."""
    from scipy.stats import binomtest

    found = binomtest(round(share * count), count).proportion_ci(0.95, method="wilson")
    return found.low, found.high


def compare_layers(args, device) -> dict:
    """Figure 1's numbers of every checkpoint, by its label, on the same held-out samples."""
    from albert_ds.data.shards import open_shards
    from albert_ds.evals.similarity import measure_similarity

    checkpoints = [args.checkpoint, *args.against]
    labels = args.labels or [checkpoint.name for checkpoint in checkpoints]
    if len({*labels}) != len(checkpoints):
        raise UserError(f"--labels {' '.join(labels)}: must be {len(checkpoints)} different names")
    source, found = open_shards(args.data, "heldout"), {}
    for label, checkpoint in zip(labels, checkpoints, strict=True):
        model = open_model(checkpoint, source.vocab.size, args.data, device)
        longest = model.config.max_position_embeddings
        batches = draw_batches(args, source, "none", args.samples, longest)
        measured = measure_similarity(model, batches, device)
        found[label] = {"sharing": model.config.sharing, **measured}
    return {"models": found}


def main(argv: list[str] | None = None) -> int:
    try:
        args = build_parser().parse_args(argv)
        if (args.against or args.labels) and not args.similarity:
            raise UserError("--against and --labels: belong to --similarity")
        from albert_ds.runtime.launch import join_world, read_world

        device = join_world(read_world())
        values = compare_layers(args, device) if args.similarity else probe(args, device)
        print(json.dumps(values, indent=1) if args.similarity else as_table(values))
        if args.output:
            args.output.write_text(json.dumps(values, indent=1) + "\n")
    except ENDINGS as ending:
        say(str(ending))
        return ending.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
