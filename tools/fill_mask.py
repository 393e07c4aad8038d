"""Fill the [MASK]s of sentences with a pretrained model's most likely pieces.

python tools/fill_mask.py --checkpoint RUN_OR_HF "A list is a [MASK] of items."
"""

import sys
from pathlib import Path

from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser

MASK_WORD = "[MASK]"


def fill_masks(checkpoint: Path, sentences: list[str], top: int) -> list[list[list]]:
    """For each sentence and each of its masks the `top` (piece, probability), best first."""
    import torch

    from albert_ds.data.vocab import MASK, read_vocab
    from albert_ds.interop import locate, read_weights
    from albert_ds.model.albert import AlbertForPretraining

    config, weights = read_weights(checkpoint)
    vocab = read_vocab(locate(checkpoint)[0] / "spiece.model")
    if not 1 <= top <= config.vocab_size:
        raise UserError(f"--top {top}: must be from 1 to the vocabulary's {config.vocab_size}")
    with torch.device("meta"):
        model = AlbertForPretraining(config)
    model.load_state_dict(weights, assign=True)
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
    """[CLS] sentence [SEP] as ids, each [MASK] one id; the ids of Hugging Face's tokenizer."""
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


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="RUN_OR_HF", help="run or HF folder")
    add("--top", type=int, default=3, metavar="N", help="pieces a mask (default: %(default)s)")
    add("sentences", nargs="+", metavar="SENTENCE", help=f"text with {MASK_WORD} where to fill")
    try:
        args = parser.parse_args(argv)
        filled = fill_masks(args.checkpoint, args.sentences, args.top)
    except ENDINGS as ending:
        print(ending, file=sys.stderr)
        return ending.code
    for sentence, masks in zip(args.sentences, filled, strict=True):
        print(sentence)
        for best in masks:
            words = (f"{piece.replace(chr(0x2581), ' ').strip()} {p:.0%}" for piece, p in best)
            print("   " + ", ".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
