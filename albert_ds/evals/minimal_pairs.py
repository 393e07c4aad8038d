"""Minimal pairs: how often a model finds the acceptable one of two sentences more likely.

A sentence is scored by its pseudo-log-likelihood (Salazar et al., 2020): each token is masked in
turn, and the log-probabilities of the true tokens are added. A pair with equal scores counts half.
With `within_word` the later tokens of the same word are masked too (Kauf and Ivanova, 2023), so
that a word is not easy to guess by its end; minicons calls that within_word_l2r.
Files are BLiMP's (Warstadt et al., 2020): `*.jsonl` with `sentence_good` and `sentence_bad`, one
file a paradigm; `linguistics_term` names the phenomenon that a paradigm belongs to.

Shapes: S sentences of T tokens.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check, parse_json, read_bytes
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.vocab.vocab import CLS, MASK, SEP, Vocab
from albert_ds.vocab.words import mark_words

TOKENS_A_PASS = 8192
# The paper's tables have twelve phenomena; the files name one of them by two terms.
PHENOMENA = {"s-selection": "argument_structure"}


@dataclass(frozen=True, slots=True)
class Pair:
    paradigm: str
    phenomenon: str
    good: str
    bad: str


def read_pairs(folder: Path) -> list[Pair]:
    """The pairs of all `*.jsonl` in a folder, by name. Raises UserError naming file and line."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise UserError(f"--minimal-pairs {folder}: no *.jsonl file in it")
    pairs = []
    for path in paths:
        for number, line in enumerate(read_bytes(path, str(path)).splitlines(), start=1):
            if not line.strip():
                continue
            name = f"{path}, line {number}"
            record = parse_json(line, name)
            check(record, {"sentence_good": str, "sentence_bad": str}, name)
            term = str(record.get("linguistics_term", ""))
            good, bad = record["sentence_good"], record["sentence_bad"]
            pairs.append(Pair(path.stem, PHENOMENA.get(term, term), good, bad))
    if not pairs:
        raise UserError(f"--minimal-pairs {folder}: no pair in its *.jsonl files")
    return pairs


def score_pairs(
    model: AlbertForPretraining,
    vocab: Vocab,
    pairs: list[Pair],
    device: torch.device,
    *,
    within_word: bool = False,
) -> list[float]:
    """1 for each pair whose good sentence scores higher, 0.5 for a tie, else 0."""
    sentences = sorted({s for pair in pairs for s in (pair.good, pair.bad)})
    of_sentences = score_sentences(model, vocab, sentences, device, within_word=within_word)
    scores = dict(zip(sentences, of_sentences, strict=True))
    differences = [scores[pair.good] - scores[pair.bad] for pair in pairs]
    return [(difference > 0) + 0.5 * (difference == 0) for difference in differences]


@torch.inference_mode()
def score_sentences(
    model: AlbertForPretraining,
    vocab: Vocab,
    sentences: list[str],
    device: torch.device,
    *,
    within_word: bool = False,
) -> list[float]:
    """The pseudo-log-likelihood of each sentence, in nats. Raises UserError if one is too long.

    Sentences of one length share a pass, so nothing is padded. The encoder may be in bf16: its
    states and the word embedding are scored in fp32.
    """
    encoded = [[CLS, *ids, SEP] for ids in vocab.encode(sentences)]
    limit = model.config.max_position_embeddings
    for sentence, ids in zip(sentences, encoded, strict=True):
        if len(ids) > limit:
            raise UserError(f"{sentence[:40]!r}...: {len(ids)} tokens; the model takes {limit}")
    model.eval()
    begins = torch.from_numpy(mark_words(vocab.pieces, segmented=False)).to(device)
    scores = [0.0] * len(sentences)
    order = sorted(range(len(sentences)), key=lambda i: len(encoded[i]))
    with tqdm(total=len(sentences), unit="sentence", disable=None) as bar:
        for length, group in groupby(order, key=lambda i: len(encoded[i])):
            owners = list(group)
            size = max(1, TOKENS_A_PASS // length**2)  # each sentence is copied n times
            for part in (owners[at : at + size] for at in range(0, len(owners), size)):
                ids = torch.tensor([encoded[owner] for owner in part], device=device)
                words = begins[ids].cumsum(1) if within_word else None
                for owner, score in zip(part, _score(model, ids, words), strict=True):
                    scores[owner] = score
                bar.update(len(part))
    return scores


def _score(model: AlbertForPretraining, ids: Tensor, words: Tensor | None) -> list[float]:
    """Pseudo-log-likelihoods of sentences int64 [S, T] of one length, with [CLS] and [SEP].

    words: the number of each token's word [S, T], where the rest of the word is masked too.
    """
    sentences, length = ids.shape
    tokens = length - 2
    if not tokens:
        return [0.0] * sentences
    # Copy t of a sentence, of tokens in all, has its token t + 1 masked.
    copies = ids.repeat_interleave(tokens, dim=0)  # [S * tokens, T]
    column = torch.arange(1, length - 1, device=ids.device).repeat(sentences)
    labels = copies.gather(1, column[:, None]).squeeze(1)
    copies.scatter_(1, column[:, None], MASK)
    if words is not None:
        words = words.repeat_interleave(tokens, dim=0)
        place = torch.arange(length, device=ids.device)
        is_rest = (words == words.gather(1, column[:, None])) & (place > column[:, None])
        copies[is_rest & (place < length - 1)] = MASK
    begins = torch.arange(len(copies) + 1, device=ids.device) * length
    output_positions, _ = torch.cat([begins[:-1], begins[:-1] + column]).sort()
    states = model.albert(
        copies.view(-1),
        torch.zeros(copies.numel(), dtype=torch.int64, device=ids.device),
        torch.arange(length, device=ids.device).repeat(len(copies)),
        begins.int(),
        length,
        output_positions,
    )["last_hidden_state"]
    # Every sequence has two output positions: [CLS], then its masked token.
    word = model.albert.embeddings.word.weight
    logits = model.mlm_head.logits(states[1::2].float(), word.float())
    chosen = logits.log_softmax(-1).gather(1, labels[:, None])
    return chosen.view(sentences, tokens).double().sum(1).tolist()


def summarise(pairs: list[Pair], right: list[float]) -> dict:
    """Accuracy in all, a phenomenon and a paradigm, each `[accuracy, pairs]`."""
    groups: dict[str, dict[str, list[float]]] = {"paradigms": {}, "phenomena": {}}
    for pair, score in zip(pairs, right, strict=True):
        groups["paradigms"].setdefault(pair.paradigm, []).append(score)
        if pair.phenomenon:
            groups["phenomena"].setdefault(pair.phenomenon, []).append(score)
    return {
        "accuracy": sum(right) / len(right),
        "pairs": len(right),
        "ties": right.count(0.5),
        **{
            kind: {
                name: [sum(results) / len(results), len(results)] for name, results in rows.items()
            }
            for kind, rows in groups.items()
        },
    }
