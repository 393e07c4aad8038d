"""The models that the flags of pretraining name: where the weights start, the teacher, the shape.

Their folders are opened here, once; nothing heavy is imported at the top.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import build
from albert_ds.model.config import SIZES, ModelConfig, reshape

if TYPE_CHECKING:
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.vocab.vocab import Vocab


def open_initial(args) -> ModelFolder | None:
    """The model of --init-from. None without one, and if it is gone since the run was saved."""
    if args.init_from is None:
        return None
    from albert_ds.checkpoint.model_folder import ModelFolder, hint_download

    folder = Path(args.init_from)
    if folder.is_dir():
        return ModelFolder(folder)
    if any(Path(args.output).glob("checkpoints/step-*")):
        return None
    raise UserError(f"--init-from {folder}: no such folder{hint_download(folder)}")


def open_teacher(args) -> ModelFolder | None:
    """The model of --teacher, and in `args` its weight; None without one, or if that is 0."""
    if args.teacher is None:
        if args.teacher_weight is not None:
            raise UserError("--teacher-weight: only with --teacher")
        return None
    from albert_ds.checkpoint.model_folder import ModelFolder

    if args.teacher_weight is None:
        args.teacher_weight = 1.0
    if args.teacher_weight == 0:
        return None
    return ModelFolder(args.teacher, needs_mlm_head=True)


def check_teacher(folder: ModelFolder | None, vocab: Vocab | None, length: int) -> None:
    """Raise UserError unless it has scores for this vocabulary, at positions up to `length`.

    vocab: that of the data, its special pieces with their ids; None: whatever the teacher's is.
    """
    if folder is None:
        return
    from albert_ds.vocab.vocab import MODEL_NAME, TOKENIZER_NAME

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
    if vocab is not None:
        folder.check_vocab(vocab, where)
    if folder.trained_length < length:
        raise UserError(
            f"{where}: has seen sequences of at most {folder.trained_length} tokens, those of this "
            f"run have up to {length}; allowed: --sequence-length {folder.trained_length} or less"
        )


def resolve_model(args, sources, initial: ModelFolder | None, before: dict | None) -> ModelConfig:
    """The shape of the model that is trained."""
    given = cli.values_of(args, ModelConfig)
    if "hidden_size" in given:
        given.setdefault("ffn_size", 4 * given["hidden_size"])
    if args.size is None and args.init_from is None:
        raise UserError(f"--model: must be one of {', '.join(SIZES)}, if there is no --init-from")
    if args.size:
        size = SIZES[args.size]
    elif initial is not None:
        size = initial.config
    else:  # a resumed run's
        size = build(ModelConfig, (before or {}).get("model"), f"{args.output}/config.json: model")
    return reshape(
        size,
        **given,
        vocab_size=sources[0].vocab.size,
        pair_head=args.objective != "none",
    )
