"""Masks are filled with the pieces that the model finds most likely."""

from dataclasses import replace

import pytest
import torch

from albert_ds.base.errors import UserError
from albert_ds.commands.fill_mask import main
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import SIZES
from tests.models import small_vocab, write_run


@pytest.fixture
def run(text_file, tmp_path):
    """A run whose model predicts, at every position, the same three words in this order."""
    vocab = small_vocab(text_file, 200)
    config = replace(SIZES["albert-tiny"], vocab_size=200, max_position_embeddings=16)
    model = AlbertForPretraining(config)
    words = [i for i, piece in enumerate(vocab.pieces) if piece.strip("\u2581").isalpha()][:3]
    with torch.no_grad():
        model.mlm_head.bias[words] = torch.tensor([12.0, 11.0, 10.0])
    write_run(tmp_path, model, vocab, stream={"sequence_length": 12})
    return tmp_path, [vocab.pieces[i].replace("\u2581", " ").strip() for i in words]


def test_each_mask_gets_the_best_pieces(run, capsys):
    folder, (first, second, third) = run
    main(["--checkpoint", str(folder), "a [MASK] is", "[MASK][MASK]"])
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[2]] == ["a [MASK] is", "[MASK][MASK]"]
    for line in (lines[1], *lines[3:]):
        words = [word.strip().rsplit(" ", 1) for word in line.split(",")]
        assert [word for word, _ in words] == [first, second, third]
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["\udcff [MASK]"], "'\\udcff [MASK]': must be UTF-8"),
        (["no mask"], "'no mask': has no [MASK]"),
        (["[MASK]" * 11], "13 tokens, the model has seen 12"),  # of 16 positions
        (["--top", "201", "[MASK]"], "--top 201: must be at most 200"),
    ],
)
def test_what_cannot_be_filled_is_refused(run, capsys, argv, words):
    with pytest.raises(UserError) as caught:
        main(["--checkpoint", str(run[0]), *argv])
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
