"""Fill each [MASK] of a sentence with the pieces that a pretrained model finds most likely.

albert-ds fill-mask --checkpoint RUN_OR_HF "A list is a [MASK] of items."
"""

from pathlib import Path

from albert_ds import cli
from albert_ds.errors import UserError

MASK_WORD = "[MASK]"


def fill_masks(checkpoint: Path, sentences: list[str], top: int) -> list[list[list]]:
    """For each sentence and each of its masks the `top` pairs (piece, probability), best first."""
    import torch

    from albert_ds.data.vocab import MASK
    from albert_ds.interop.weights import read_model, read_model_vocab

    model, vocab = read_model(checkpoint), read_model_vocab(checkpoint)
    config = model.config
    if vocab.size != config.vocab_size:
        raise UserError(
            f"--checkpoint {checkpoint}: its vocabulary has {vocab.size} pieces, its model's "
            f"vocab_size is {config.vocab_size}; they must be the same"
        )
    if top > config.vocab_size:
        raise UserError(f"--top {top}: must be at most {config.vocab_size}, the vocabulary's size")
    samples = [torch.tensor(encode(vocab, s, config.max_position_embeddings)) for s in sentences]
    lengths = [len(sample) for sample in samples]
    ids = torch.cat(samples)
    masks = (ids == MASK).nonzero().squeeze(1)
    with torch.inference_mode():
        states = model.eval().albert(
            ids,
            torch.zeros_like(ids),
            torch.cat([torch.arange(length) for length in lengths]),
            torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
            max(lengths),
        )["last_hidden_state"][masks]
        logits = model.mlm_head.logits(states, model.albert.embeddings.word.weight)
        best = logits.softmax(-1).topk(top)
    filled = [
        [(vocab.pieces[piece], p) for piece, p in zip(pieces, ps, strict=True)]
        for pieces, ps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    fills = iter(filled)
    return [[next(fills) for _ in range(int((sample == MASK).sum()))] for sample in samples]


def encode(vocab, sentence: str, limit: int) -> list[int]:
    """[CLS] sentence [SEP] as ids, one id for each [MASK], as Hugging Face's tokenizer does."""
    from albert_ds.data.vocab import CLS, MASK, SEP

    if MASK_WORD not in sentence:
        raise UserError(f"{sentence!r}: has no {MASK_WORD}")
    ids = [CLS]
    for part in vocab.encode(sentence.split(MASK_WORD)):
        ids += [*part, MASK]
    ids[-1] = SEP
    if len(ids) > limit:
        raise UserError(f"{sentence[:40]!r}...: {len(ids)} tokens, the model takes {limit}")
    return ids


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="RUN_OR_HF",
        help="pretraining run, checkpoint or Hugging Face folder",
    )
    add("--top", type=cli.positive, default=3, metavar="PIECES", help="pieces to show for a mask")
    add("sentences", nargs="+", metavar="SENTENCE", help=f"text with one {MASK_WORD} or more")
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    filled = fill_masks(args.checkpoint, args.sentences, args.top)
    for sentence, masks in zip(args.sentences, filled, strict=True):
        print(sentence)
        for best in masks:
            words = (f"{piece.replace(chr(0x2581), ' ').strip()} {p:.0%}" for piece, p in best)
            print("   " + ", ".join(words))
