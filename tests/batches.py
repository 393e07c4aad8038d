"""Small random batches in the product's layout, and the same ones padded for Hugging Face."""

import numpy as np
import torch

from albert_ds.data.micro_batch import MicroBatch
from albert_ds.model.draws import draw_seeds

IGNORED = -100


def random_samples(num_samples: int, *, vocab_size: int, max_length: int, seed: int) -> list[dict]:
    """Sequences of unequal length: ids, segments, masked positions with labels, a pair label.

    Id 0 is padding, which Hugging Face gives no gradient; it never occurs in a real sequence.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        length = int(rng.integers(max_length // 2, max_length + 1))
        masked = np.sort(rng.choice(length, size=max(1, length // 6), replace=False))
        samples.append(
            {
                "input_ids": rng.integers(1, vocab_size, length),
                "token_type_ids": (np.arange(length) > length // 2).astype(np.int64),
                "masked_positions": masked,
                "masked_labels": rng.integers(1, vocab_size, len(masked)),
                "pair_label": int(rng.choice([0, 1, 1, 0, IGNORED])),
            }
        )
    return samples


def concatenate(samples: list[dict]) -> MicroBatch:
    """The samples end to end, as the loader yields them.

    With seeds of dropout if each has the `number` of its place in the stream.
    """
    lengths = [len(s["input_ids"]) for s in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    labels = [s["pair_label"] for s in samples]
    tensors = {
        "input_ids": _join(s["input_ids"] for s in samples),
        "token_type_ids": _join(s["token_type_ids"] for s in samples),
        "position_ids": _join(np.arange(length) for length in lengths),
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
        "masked_positions": _join(
            s["masked_positions"] + start for s, start in zip(samples, starts, strict=False)
        ),
        "masked_labels": _join(s["masked_labels"] for s in samples),
        "pair_labels": torch.tensor(labels),
    }
    if all("number" in s for s in samples):
        numbers = [s["number"] for s in samples]
        tensors["seeds"] = torch.from_numpy(draw_seeds(0, numbers, np.array(lengths)))
    return MicroBatch.pack(
        tensors,
        max_seqlen=max(lengths),
        samples=len(samples),
        tokens=int(starts[-1]),
        masked=len(tensors["masked_positions"]),
        pairs=sum(label != IGNORED for label in labels),
        unpaired=sum(label == IGNORED for label in labels),
        unused_tokens=0,
        available=int(starts[-1]),
        sample_ids=list(range(len(samples))),
    )


def _join(arrays) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(list(arrays))).long()


def pad(samples: list[dict]) -> dict[str, torch.Tensor]:
    """The same samples as keywords of Hugging Face's AlbertForPreTraining."""
    width = max(len(s["input_ids"]) for s in samples)
    shape = (len(samples), width)
    padded = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "token_type_ids": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORED),
        "sentence_order_label": torch.tensor([s["pair_label"] for s in samples]),
    }
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        padded["input_ids"][row, :length] = torch.as_tensor(sample["input_ids"])
        padded["attention_mask"][row, :length] = 1
        padded["token_type_ids"][row, :length] = torch.as_tensor(sample["token_type_ids"])
        labels = torch.as_tensor(sample["masked_labels"])
        padded["labels"][row, torch.as_tensor(sample["masked_positions"])] = labels
    return padded
