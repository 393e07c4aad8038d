"""The tables of the order of two segments: what is counted, and what the words alone can tell."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from albert_lab.order_pairs import draw_pairs, group_by_length, list_pairs, show
from torch.nn.functional import one_hot

from albert_ds.errors import UserError
from tests.batches import concatenate
from tests.finetuning import write_checkpoint
from tools.lab import sentence_order
from tools.lab.sentence_order import FREQUENT, classify_words, find_rare, judge_order, main

MASK = 4
RARE, OTHER = FREQUENT, FREQUENT + 7


def sample(ids, masks, pair_label=0, types=None) -> dict:
    """A sequence whose text is `ids`, seen with what `masks` puts at some places."""
    seen = np.array(ids)
    seen[list(masks)] = list(masks.values())
    return {
        "input_ids": seen,
        "token_type_ids": np.array(types or [0] * len(ids)),
        "masked_positions": np.array(sorted(masks)),
        "masked_labels": np.array([ids[place] for place in sorted(masks)]),
        "pair_label": pair_label,
    }


BATCH = [
    sample([2, RARE, 9, RARE, OTHER, 3], {1: MASK, 4: MASK}),  # in view; in the other sequence
    sample([2, OTHER, RARE, RARE, 9, 9, 3], {2: MASK, 3: MASK, 4: MASK}),  # both masked; frequent
    sample([2, RARE, 8, 3], {1: RARE}),  # left as it is, and nowhere else
]


def test_a_piece_in_view_is_one_that_no_mask_covers_in_the_same_sequence():
    rare, seen = find_rare(concatenate(BATCH))
    assert rare.tolist() == [True, True, True, True, False, True]
    assert seen.tolist() == [True, False, False, False, True, False]


def test_without_masks_the_text_is_there_again():
    batch = concatenate(BATCH)
    text = [2, RARE, 9, RARE, OTHER, 3, 2, OTHER, RARE, RARE, 9, 9, 3, 2, RARE, 8, 3]
    assert show(batch).tensors["input_ids"].tolist() == text
    assert batch.tensors["input_ids"].tolist() != text


def test_pairs_count_in_the_class_of_their_shorter_segment():
    """[CLS] and [SEP] belong to no segment; sequences without a label are no pairs."""
    one, two = [0] * 41 + [1] * 26, [0] * 26 + [1] * 27
    batch = concatenate(
        [
            sample([2, *[7] * 39, 3, *[7] * 25, 3], {1: MASK}, 1, one),  # 39 and 25 tokens
            sample([2, *[7] * 24, 3, *[7] * 26, 3], {1: MASK}, 0, two),  # 24 and 26
            sample([2, 7, 7, 3, 7, 7, 3], {1: MASK}, -100, [0] * 4 + [1] * 3),
        ]
    )
    pairs = list_pairs([batch])
    assert [(len(first), len(second), label) for first, second, label in pairs] == [
        (39, 25, 1),
        (24, 26, 0),
    ]
    found = group_by_length(pairs, [True, False])
    assert list(found.values()) == [[0, 1], [1, 1], [0, 0]]


def test_the_order_is_judged_as_training_counts_it(data, tmp_path):
    """Against the model's own `pair_correct`, of all sequences together."""
    from albert_ds.data.shards import open_shards
    from albert_ds.interop.weights import read_model

    heldout = open_shards(data, "heldout")
    sizes = {"vocab_size": heldout.vocab.size, "seed": 3}
    model = read_model(write_checkpoint(tmp_path / "run", heldout.vocab, **sizes)).eval()
    with torch.no_grad():  # a head that tells some orders and not others
        model.pair_head.weight.mul_(100)
        batches = list(draw_pairs(heldout, 150, 64))
        expected = sum(int(model(**batch.tensors)["pair_correct"]) for batch in batches)
    found = judge_order(model, batches)
    assert (int(found.sum()), len(found)) == (expected, sum(batch.pairs for batch in batches))
    assert 0 < expected < len(found)


def test_copies_are_counted_by_where_else_the_piece_stands():
    """A model that always says RARE: right for the one in view and three of the four others."""

    class Model:
        mlm_head = SimpleNamespace(logits=lambda states, word: states)

        def albert(self, input_ids, **tensors):
            return {"last_hidden_state": one_hot(torch.full_like(input_ids, RARE), OTHER + 1)}

    Model.albert.embeddings = SimpleNamespace(word=SimpleNamespace(weight=None))
    found = sentence_order.measure_copying(Model(), [concatenate(BATCH)])
    assert found == {"elsewhere": [1, 1], "nowhere": [3, 4]}


@pytest.mark.parametrize("marked", [True, False])
def test_words_tell_the_order_where_one_says_it_comes_second(marked):
    draw = np.random.default_rng(0)

    def make(count: int) -> list:
        samples = []
        for _ in range(count):
            segments = draw.integers(20, 400, (2, 6)).tolist()
            segments[1][2] = 11 if marked else segments[1][2]  # as "therefore" would
            swapped = int(draw.integers(2))
            first, second = segments[::-1] if swapped else segments
            ids = [2, *first, 3, *second, 3]
            samples.append(sample(ids, {3: MASK}, swapped, [0] * 8 + [1] * 7))
        return [show(concatenate(samples))]

    right, count, known = classify_words(make(600), make(400))
    assert (count, known) == (400, 600)
    assert right == 400 if marked else 150 < right < 250


def test_the_command_prints_both_tables(data, tmp_path, capsys):
    from albert_ds.data.shards import open_shards

    vocab = open_shards(data, "heldout").vocab
    sizes = {"vocab_size": vocab.size, "seed": 3}
    run = write_checkpoint(tmp_path / "run", vocab, **sizes)
    output = tmp_path / "order.json"
    words = ["--data", str(data), "--samples", "40", "--word-samples", "80"]
    main(["--checkpoint", str(run), *words, "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["masked"][1] == found["shown"][1] == found["words"][1] > 10
    by_length = found["lengths"].values()
    assert [sum(column) for column in zip(*by_length, strict=True)] == found["shown"]
    printed = capsys.readouterr().out
    right, count = found["shown"]
    assert f"| the model, no masks | {right / count:.1%} |" in printed
    assert "| in view elsewhere in the sequence | - | - | 0 |" in printed  # of 300 pieces
    alone = write_checkpoint(tmp_path / "alone", vocab, pair_head=False, **sizes)
    with pytest.raises(UserError, match="must have a head for the order"):
        main(["--checkpoint", str(alone), *words])
