"""The vocabulary of a `tokenizer.json`, which is all that transformers 5 saves of a tokenizer.

The file holds the pieces with their scores, the character map and the steps of normalisation:
everything that the SentencePiece model is built from. `Vocab.build_tokenizer` writes such files.
"""

import base64
import json
from pathlib import Path

from sentencepiece.sentencepiece_model_pb2 import ModelProto  # ty: ignore[import-not-found]
from tokenizers import Tokenizer, models

from albert_ds.base.cli import Range, non_negative
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check, read_json
from albert_ds.vocab.vocab import (
    CONFIG_NAME,
    MODEL_NAME,
    SPECIAL_PIECES,
    TOKENIZER_NAME,
    UNK,
    Normalisation,
    Vocab,
    list_user_pieces,
    make_portable,
    open_vocab,
)
from albert_ds.vocab.words import BYTE_PIECE

SCORE = Range(ge=-1e6, le=1e6)  # of a piece: the logarithm of its probability
SCHEMA = {
    "model": {"type": str, "unk_id": non_negative, "vocab": [[str, SCORE]]},
    "normalizer": {"normalizers": [{"type": str}]},
    "pre_tokenizer": {"pretokenizers": [{"type": str}]},
    "added_tokens": [{"id": non_negative, "content": str}],
}
# A step of transformers 4: one blank instead of several, as every ALBERT tokenizer does later on.
BLANKS = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
NORMALISATIONS = [
    Normalisation(lower_case=lower_case, keep_accents=keep_accents, form=form)
    for form, keep_accents in (("nfkc", True), ("albert", True), ("albert", False))
    for lower_case in (True, False)
]


def read_tokenizer_json(path: Path) -> Vocab:
    """Build the vocabulary of a `tokenizer.json` of an ALBERT, ours or `AlbertTokenizer`'s.

    Raises UserError, with the path, if the file is not that of an ALBERT, or if the
    `tokenizer_config.json` beside it contradicts it.
    """
    content = read_json(path)
    check(content, SCHEMA, str(path))
    model = content["model"]
    steps = content["normalizer"]["normalizers"]
    pieces = [(piece, float(score)) for piece, score in model["vocab"]]
    kind = model["type"]
    unk = model["unk_id"]
    byte_fallback = model.get("byte_fallback", False)
    check(byte_fallback, (bool, None), f"{path}: model.byte_fallback")
    charsmap = b""
    for step in steps:
        if step["type"] == "Precompiled":
            check(step, {"precompiled_charsmap": (str, None)}, str(path))
            try:
                charsmap = base64.b64decode(step["precompiled_charsmap"] or "", validate=True)
            except ValueError as error:
                raise UserError(f"{path}: precompiled_charsmap: {error}") from None
    if (kind, unk) != ("Unigram", UNK):
        raise UserError(
            f"{path}: its model is {kind}, unk_id {unk}; an ALBERT's is Unigram, unk_id {UNK}"
        )
    splits = []
    for step in content["pre_tokenizer"]["pretokenizers"]:
        has_prefix = step.get("prepend_scheme") == "always" or step.get("add_prefix_space", False)
        splits.append(step["type"] if step["type"] != "Metaspace" or has_prefix else "no prefix")
    if splits != ["WhitespaceSplit", "Metaspace"]:
        raise UserError(f"{path}: splits text by {splits}, an ALBERT by white space")
    for number, token in ((int(one["id"]), one["content"]) for one in content["added_tokens"]):
        if number >= len(pieces) or pieces[number][0] != token:
            raise UserError(f"{path}: added token {token!r}, id {number}, is no piece of the model")
    normalisation = _find_normalisation(path, steps, charsmap)
    model_file = _build_model(pieces, charsmap, normalisation.name, bool(byte_fallback))
    return open_vocab(make_portable(model_file, str(path)), normalisation, str(path))


def list_added_tokens(folder: Path) -> list[str]:
    """What Hugging Face finds in a text before it looks for pieces, but ALBERT's special five.

    Raises UserError for a file that is none of a tokenizer.
    """
    path, model = folder / TOKENIZER_NAME, folder / MODEL_NAME
    added: list[str] = []
    if path.is_file():
        content = read_json(path)
        check(content, {"added_tokens": [{"content": str}]}, str(path))
        added = [one["content"] for one in content["added_tokens"]]
    elif model.is_file():
        added = list_user_pieces(model)
    return [token for token in added if token not in SPECIAL_PIECES]


def _find_normalisation(path: Path, steps: list[dict], charsmap: bytes) -> Normalisation:
    """The normalisation with exactly these steps; UserError if there is none."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0)], 0))
    wanted = steps[:-1] if steps[-1:] == [BLANKS] else steps
    for normalisation in NORMALISATIONS:
        tokenizer.normalizer = normalisation.build_steps(charsmap)
        if json.loads(tokenizer.to_str())["normalizer"]["normalizers"] == wanted:
            break
    else:
        names = ", ".join(step["type"] for step in steps)
        raise UserError(f"{path}: its normalizer ({names}) is none of an ALBERT")
    beside = path.with_name(CONFIG_NAME)
    config = read_json(beside) if beside.is_file() else {}
    flags = {"do_lower_case": normalisation.lower_case, "keep_accents": normalisation.keep_accents}
    for name, value in flags.items():
        if config.get(name, value) != value:
            raise UserError(f"{beside}: {name} is {config[name]}, but {path.name} does otherwise")
    return normalisation


def _build_model(
    pieces: list[tuple[str, float]], charsmap: bytes, normalisation: str, byte_fallback: bool
) -> bytes:
    """A SentencePiece model of these (piece, score), marked with the normalisation's name."""
    proto = ModelProto()
    spec = proto.trainer_spec
    spec.model_type = spec.UNIGRAM
    spec.vocab_size = len(pieces)
    spec.pad_id = 0
    spec.unk_id = UNK
    spec.bos_id = -1
    spec.eos_id = -1
    spec.pad_piece, spec.unk_piece = SPECIAL_PIECES[:2]
    spec.control_symbols.extend(SPECIAL_PIECES[2:])
    if byte_fallback:
        spec.byte_fallback = True
    proto.normalizer_spec.name = normalisation
    proto.normalizer_spec.precompiled_charsmap = charsmap
    for number, (text, score) in enumerate(pieces):
        piece = proto.pieces.add(piece=text, score=score)
        if number < len(SPECIAL_PIECES):
            piece.type = piece.UNKNOWN if number == UNK else piece.CONTROL
        elif byte_fallback and BYTE_PIECE.fullmatch(text):
            piece.type = piece.BYTE
    return proto.SerializeToString()
