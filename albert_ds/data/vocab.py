"""The vocabulary: SentencePiece unigram in ALBERT's layout (paper Sec. 4.1; ids as released).

    0 <pad>  1 <unk>  2 [CLS]  3 [SEP]  4 [MASK]
    5 (  6 )  7 "  8 -  9 .  10 en dash  11 pound sign  12 euro sign  13 and on: as trained

The ids of a text are the same here and in Hugging Face's `AlbertTokenizer` built from the same
`spiece.model`: text is normalised by the very same code, and `make_portable` removes what the two
would read differently in the model. How text is normalised is kept beside the model in
`tokenizer_config.json`, where `AlbertTokenizer` looks for it as well.
"""

import hashlib
import io
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from albert_ds.data.storage import join, read_bytes
from albert_ds.errors import DamagedData, UserError

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL_PIECES = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
USER_SYMBOLS = ("(", ")", '"', "-", ".", "\N{EN DASH}", "\N{POUND SIGN}", "\N{EURO SIGN}")
NUM_FIXED = len(SPECIAL_PIECES) + len(USER_SYMBOLS)

MODEL_NAME = "spiece.model"
PIECES_NAME = "spiece.vocab"
CONFIG_NAME = "tokenizer_config.json"

SCORE_STEP = 1 / 1024  # float32 sums of multiples of this are exact for up to 16,000 nats of text
NEVER = -100.0  # added to the score (log probability) of a piece that is not to be used
NUM_THREADS = 16  # a constant, never the machine's: the order of float sums depends on it


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """What ALBERT does to text before SentencePiece sees it."""

    lower_case: bool = True  # False: --keep-case
    keep_accents: bool = False  # True: --keep-accents

    def build(self, charsmap: bytes = b"") -> Callable[[str], str]:
        """The function text -> text of `AlbertTokenizer`, with a SentencePiece model's own map."""
        from tokenizers import normalizers

        steps: list[normalizers.Normalizer] = [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
        ]
        if not self.keep_accents:
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if self.lower_case:
            steps.append(normalizers.Lowercase())
        if charsmap:
            steps.append(normalizers.Precompiled(charsmap))
        full = normalizers.Sequence(steps).normalize_str

        def normalise(text: str) -> str:
            if text.isascii() and text.isprintable():  # the same, several times faster
                text = text.replace("``", '"').replace("''", '"')
                return text.lower() if self.lower_case else text
            # The one white space at which AlbertTokenizer splits and which SentencePiece keeps.
            return full(text).replace("\N{NEXT LINE}", " ")

        return normalise


class Vocab:
    """A vocabulary ready to encode; `model` is the content of its `spiece.model`."""

    def __init__(self, model: bytes, normalisation: Normalisation):
        import sentencepiece

        self.model = model
        self.normalisation = normalisation
        self.sha256 = hashlib.sha256(model).hexdigest()
        proto = _parse(model)
        self.normalise = normalisation.build(proto.normalizer_spec.precompiled_charsmap)
        # Applied above: SentencePiece and Hugging Face differ on letters with stacks of accents.
        proto.normalizer_spec.precompiled_charsmap = b""
        self._processor = sentencepiece.SentencePieceProcessor(
            model_proto=proto.SerializeToString()
        )
        self.pieces: list[str] = [piece.piece for piece in proto.pieces]
        self.size = len(self.pieces)

    def __reduce__(self):
        return Vocab, (self.model, self.normalisation)  # for worker processes

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text. Text that spells a special piece ("[MASK]") stays ordinary text."""
        return self._processor.encode([self.normalise(text) for text in texts], num_threads=1)

    def encode_with_offsets(self, normalised: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text that is normalised already; of each the characters it stands for."""
        found = self._processor.encode(normalised, return_type="offset_mapping")
        return list(found["ids"]), found["offsets"]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, normalised as `encode` had left it."""
        return self._processor.decode(ids)

    def write(self, folder: Path) -> None:
        """Write `spiece.model` and `tokenizer_config.json` into `folder`."""
        (folder / MODEL_NAME).write_bytes(self.model)
        config = {
            "tokenizer_class": "AlbertTokenizer",
            "do_lower_case": self.normalisation.lower_case,
            "keep_accents": self.normalisation.keep_accents,
        }
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def write_pieces(self, folder: Path) -> None:
        """Write `spiece.vocab`: a line "piece <tab> score" for each id, for people to read."""
        scores = map(self._processor.get_score, range(self.size))
        lines = [f"{piece}\t{score:g}\n" for piece, score in zip(self.pieces, scores, strict=True)]
        (folder / PIECES_NAME).write_text("".join(lines), encoding="utf-8")


def read_vocab(location: Path | str, *, sha256: str | None = None) -> Vocab:
    """Read a `spiece.model`, at a path or a URL, with the `tokenizer_config.json` beside it.

    A model that lies alone is normalised as `AlbertTokenizer` does unasked: lower case, no accents.
    Raises UserError where it is no model of ALBERT's, or not the one of `sha256`.
    """
    location = str(location)
    try:
        model = read_bytes(location)
    except OSError:
        raise UserError(
            f"{location}: no such file; a vocabulary is a {MODEL_NAME} of build_vocab.py"
        ) from None
    if sha256 not in (None, hashlib.sha256(model).hexdigest()):
        raise UserError(f"{location}: not the vocabulary these shards were built with")
    beside = join(location.rpartition("/")[0] or ".", CONFIG_NAME)
    try:
        config = json.loads(read_bytes(beside))
    except FileNotFoundError:
        config = {}
    except ValueError as error:
        raise UserError(f"{beside}: not JSON: {error}") from None
    normalisation = Normalisation(
        lower_case=config.get("do_lower_case", True), keep_accents=config.get("keep_accents", False)
    )
    try:
        return Vocab(make_portable(model, location), normalisation)
    except RuntimeError as error:
        raise UserError(f"{location}: SentencePiece cannot read it: {error}") from None


def train_vocab(
    sentences: Iterable[str],
    normalisation: Normalisation,
    *,
    vocab_size: int,
    character_coverage: float = 0.99995,
    sample_size: int = 10_000_000,
    seed: int = 0,
) -> Vocab:
    """Train on a stream of sentences, of which a random `sample_size` are held in memory.

    The sample is drawn here, as SentencePiece's own cannot be seeded: the same text gives the same
    bytes. Raises UserError if the text is too little for `vocab_size` pieces, and whatever
    `sentences` raises.
    """
    import sentencepiece

    if vocab_size <= NUM_FIXED:
        raise UserError(f"--vocab-size {vocab_size}: must be over the {NUM_FIXED} fixed pieces")
    failure: list[Exception] = []  # SentencePiece turns every exception into a RuntimeError

    def normalised() -> Iterator[str]:
        normalise = normalisation.build()
        try:
            sample = _draw_sample(sentences, sample_size, random.Random(seed))
            while sample:
                yield normalise(sample.pop())  # SentencePiece keeps its own copy
        except (UserError, DamagedData, OSError) as error:
            failure.append(error)
            raise

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=normalised(),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=-1,
            eos_id=-1,
            control_symbols=list(SPECIAL_PIECES[2:]),
            user_defined_symbols=list(USER_SYMBOLS),
            shuffle_input_sentence=True,  # as released; of no effect on this sample
            input_sentence_size=sample_size,
            max_sentence_length=1 << 30,  # in bytes; the default silently skips what is longer
            num_threads=NUM_THREADS,
            minloglevel=4,
        )
    except RuntimeError as error:
        if failure:
            raise failure[0] from None
        raise UserError(_explain(str(error), vocab_size)) from None
    return Vocab(make_portable(model.getvalue(), "the trained model"), normalisation)


def _draw_sample(sentences: Iterable[str], size: int, rng: random.Random) -> list[str]:
    """`size` of the sentences, each with the same probability; all of them if there are fewer."""
    sample: list[str] = []
    for number, sentence in enumerate(sentences):
        if number < size:
            sample.append(sentence)
        elif (slot := rng.randrange(number + 1)) < size:
            sample[slot] = sentence
    return sample


def _explain(error: str, vocab_size: int) -> str:
    """SentencePiece's complaint as one line about the flag it concerns."""
    if limit := re.search(r"Vocabulary size too high .* <= (\d+)", error):
        return f"--vocab-size {vocab_size}: this text yields at most {limit[1]} pieces"
    if needed := re.search(r"smaller than required_chars. (\d+) vs (\d+)", error):
        return f"--vocab-size {vocab_size}: this text has {needed[2]} characters and fixed pieces"
    if "!sentences_.empty()" in error:
        return "--input: the files hold no text"
    return f"SentencePiece cannot train on this text: {error}"


def make_portable(model: bytes, name: str) -> bytes:
    """The same vocabulary, such that every reader of it finds the same best segmentation.

    1. User symbols become ordinary pieces. No other piece contains their characters and their
       score is 0, the best, so SentencePiece segments as before; `AlbertTokenizer` would make
       "added tokens" of them and put a word boundary after each one.
    2. A piece that ends in digit + comma is never used. ALBERT's tokeniser takes the comma off
       such pieces; Hugging Face has done so in some versions and not in others.
    3. Scores are rounded to multiples of 2**-10, so that sums are exact in float32 (SentencePiece)
       and in float64 (Hugging Face) and both break a tie ("0|00" or "00|0") alike.

    Applying it again changes nothing. Raises UserError where the layout is not ALBERT's.
    """
    proto = _parse(model, name)
    first = tuple(piece.piece for piece in proto.pieces[: len(SPECIAL_PIECES)])
    if first != SPECIAL_PIECES:
        raise UserError(f"{name}: its first pieces are {first}, ALBERT's are {SPECIAL_PIECES}")
    for piece in proto.pieces:
        if piece.type == piece.USER_DEFINED:
            piece.type = piece.NORMAL
        if piece.piece[-1:] == "," and piece.piece[-2:-1].isdigit() and piece.score > NEVER:
            piece.score += NEVER
        piece.score = round(piece.score / SCORE_STEP) * SCORE_STEP
    return proto.SerializeToString()


def _parse(model: bytes, name: str = MODEL_NAME):
    """The SentencePiece model as a protocol buffer."""
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # ty: ignore[import-not-found]

    try:
        return ModelProto.FromString(model)
    except DecodeError:
        raise UserError(f"{name}: not a SentencePiece model") from None
