"""The teacher of --teacher: which folders may be one, and how it is read."""

import torch

from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.model.teacher import Teacher
from albert_ds.vocab.vocab import MODEL_NAME, TOKENIZER_NAME, Vocab


def check_teacher(folder: ModelFolder, vocab: Vocab, length: int) -> None:
    """Raise UserError unless it has scores for this vocabulary, at positions up to `length`.

    The ids of the special pieces are part of the vocabulary.
    """
    where = f"--teacher {folder.path}"
    if folder.head is not None:
        raise UserError(
            f"{where}: a fine-tuned model ({folder.head.kind}); must be a pretrained one"
        )
    if not folder.has_vocab:
        raise UserError(
            f"{where}: no vocabulary beside its weights, which may be of another; must have "
            f"{MODEL_NAME} or {TOKENIZER_NAME}"
        )
    folder.check_vocab(vocab, where)
    if folder.trained_length < length:
        raise UserError(
            f"{where}: has seen sequences of at most {folder.trained_length} tokens, those of this "
            f"run have up to {length}; allowed: --sequence-length {folder.trained_length} or less"
        )


def read_teacher(
    folder: ModelFolder, weight: float, dtype: torch.dtype, device: torch.device
) -> Teacher:
    """The teacher on its device, whole on every rank."""
    return Teacher(folder.build_model().to(device, dtype), weight)
