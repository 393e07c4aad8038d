"""The vocabulary: SentencePiece unigram in ALBERT's layout (paper Sec. 4.1; ids as released).

    0 <pad>  1 <unk>  2 [CLS]  3 [SEP]  4 [MASK]
    5 (  6 )  7 "  8 -  9 .  10 en dash  11 pound sign  12 euro sign
    13 and on: as trained; with byte fallback the 256 bytes first

Text is normalised once, by `Normalisation`, before SentencePiece sees it, in training and in
encoding alike. Hugging Face does the same steps: `build_tokenizer` writes them to `tokenizer.json`.
`tokenizer_config.json` beside the model says which steps these are.
"""

import hashlib
import heapq
import io
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # ty: ignore[import-not-found]
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from albert_ds.base.errors import UserError
from albert_ds.base.files import write_file
from albert_ds.base.json_files import MAX_BYTES, check, parse_json
from albert_ds.base.storage import beside, read_bytes

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL_PIECES = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
USER_SYMBOLS = ("(", ")", '"', "-", ".", "\N{EN DASH}", "\N{POUND SIGN}", "\N{EURO SIGN}")
NUM_FIXED = len(SPECIAL_PIECES) + len(USER_SYMBOLS)
NUM_BYTES = 256

MODEL_NAME = "spiece.model"
PIECES_NAME = "spiece.vocab"
CONFIG_NAME = "tokenizer_config.json"
TOKENIZER_NAME = "tokenizer.json"
FILES = (MODEL_NAME, PIECES_NAME, CONFIG_NAME, TOKENIZER_NAME)

WORD_MARK = "\u2581"  # SentencePiece's space
RESERVED = "\u2585"  # SentencePiece trains on no sentence that has it
WORD_END = "\x01"  # between the words of segmented text for training; never in normalised text
CHARSMAP = "nmt_nfkc"  # SentencePiece's own normalisation, as in the released models
SCORE_STEP = 1 / 1024  # float32 sums of multiples of this are exact for up to 16,000 nats of text
NEVER = -100.0  # added to the score (log probability) of a piece that is not to be used

TRAINER: Any = {
    "model_type": "unigram",
    "normalization_rule_name": "identity",
    "pad_id": PAD,
    "unk_id": UNK,
    "bos_id": -1,
    "eos_id": -1,
    "control_symbols": list(SPECIAL_PIECES[2:]),
    "user_defined_symbols": list(USER_SYMBOLS),
    "shuffle_input_sentence": True,  # as released; of no effect on the sample
    "max_sentence_length": 1 << 30,  # in bytes; the default silently skips what is longer
    "num_threads": 16,  # never the machine's number: the order of float sums depends on it
    "minloglevel": 4,
}
# What spells the piece of a byte has pieces of its own, so that text that spells one is told apart.
BYTE_FALLBACK: Any = {"byte_fallback": True, "required_chars": "<>x0123456789ABCDEFabcdef"}

FORMS = ("nfkc", "albert")
# Removed by form nfkc: control characters that are not white space, the soft hyphen, the zero-width
# space and no-break space, the word joiner, and the marks that set the direction of writing. The
# zero-width joiner and non-joiner stay: Persian and the scripts of India spell words with them.
INVISIBLE = (
    r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e"
    r"\u2060\u2066-\u2069\ufeff]"
)
SPACES = r"[\t-\r\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\u2581]"
# NFKC takes these vowels of Thai and Lao apart, which no keyboard and no other text does.
COMPOSED_AGAIN = {"\u0e4d\u0e32": "\u0e33", "\u0ecd\u0eb2": "\u0eb3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """The steps from text to what SentencePiece sees.

    nfkc    ALBERT's quotes; invisible characters removed; NFKC, which composes letters and marks;
            lower case. Accents and all other marks stay.
    albert  The steps of Hugging Face's `AlbertTokenizer`: ALBERT's quotes; NFKD without accents;
            lower case; SentencePiece's own map. As released, and as older vocabularies have it.
    """

    lower_case: bool = True  # False: --keep-case
    keep_accents: bool = True  # False: --strip-accents
    form: str = "nfkc"  # FORMS

    def __post_init__(self):
        assert self.form in FORMS and (self.keep_accents or self.form == "albert")

    @property
    def name(self) -> str:
        """What a model trained so is marked with; those of form albert as they always were."""
        if self.form == "albert":
            return CHARSMAP
        return self.form + ("-lower" if self.lower_case else "-cased")

    def build_steps(self, charsmap: bytes) -> Any:
        """The steps as a normalizer of the tokenizers library; `charsmap` is the model's own."""
        steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if self.form == "nfkc":
            steps.append(normalizers.Replace(Regex(INVISIBLE), ""))
            steps.append(normalizers.Replace(Regex(SPACES), " "))
            steps.append(normalizers.NFKC())
        elif not self.keep_accents:
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if self.lower_case:
            steps.append(normalizers.Lowercase())
        if self.form == "nfkc":
            steps += [normalizers.Replace(*pair) for pair in COMPOSED_AGAIN.items()]
        elif charsmap:
            steps.append(normalizers.Precompiled(charsmap))
        return normalizers.Sequence(steps)

    def build(self, charsmap: bytes | None = None) -> Callable[[str], str]:
        """The function text -> normalised text; `charsmap`: the model's own, else a new one's."""
        full = self.build_steps(_default_charsmap() if charsmap is None else charsmap).normalize_str

        def normalise(text: str) -> str:
            if text.isascii() and text.isprintable():  # the same, several times faster
                text = text.replace("``", '"').replace("''", '"')
                return text.lower() if self.lower_case else text
            # The one white space at which AlbertTokenizer splits and which SentencePiece keeps.
            return full(text).replace("\N{NEXT LINE}", " ")

        return normalise


RELEASED = Normalisation(lower_case=True, keep_accents=False, form="albert")


class Vocab:
    """A vocabulary ready to encode; `model` is the content of its `spiece.model`."""

    def __init__(self, model: bytes, normalisation: Normalisation):
        self.model = model
        self.normalisation = normalisation
        self.sha256 = hashlib.sha256(model).hexdigest()
        proto = _parse(model)
        # Raises for a damaged map of characters, which not every form below reads.
        sentencepiece.SentencePieceProcessor(model_proto=model)
        self.normalise = normalisation.build(proto.normalizer_spec.precompiled_charsmap)
        # Applied above: SentencePiece and Hugging Face differ on letters with stacks of accents.
        proto.normalizer_spec.precompiled_charsmap = b""
        self._processor = sentencepiece.SentencePieceProcessor(
            model_proto=proto.SerializeToString()
        )
        self.pieces: list[str] = [piece.piece for piece in proto.pieces]
        self.size = len(self.pieces)
        self.byte_fallback: bool = proto.trainer_spec.byte_fallback

    def __reduce__(self):
        return _reopen, (self.model, self.normalisation)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text. Text that spells a special piece ("[MASK]") stays ordinary text."""
        return self._processor.encode([self.normalise(text) for text in texts], num_threads=1)

    def encode_with_offsets(self, normalised: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text that is normalised already, and the characters that each stands for."""
        encoding = self._processor.encode(normalised, return_type="offset_mapping")
        return list(encoding["ids"]), encoding["offsets"]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, in the normalised form."""
        return self._processor.decode(ids)

    def build_tokenizer(self, *, plain: bool = False) -> Tokenizer:
        """The same vocabulary for the tokenizers library, and so for Hugging Face: same ids.

        It puts [CLS] and [SEP] around one text or a pair of texts, as `AlbertTokenizer` does. A
        `plain` one does not, and takes "[MASK]" in a text for ordinary text, as `encode` does.
        """
        proto = _parse(self.model)
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        if plain:  # normalised text has no NUL
            scores[: len(SPECIAL_PIECES)] = [(f"\0{piece}", 0.0) for piece in SPECIAL_PIECES]
        tokenizer: Any = Tokenizer(
            models.Unigram(scores, unk_id=UNK, byte_fallback=self.byte_fallback)
        )
        tokenizer.normalizer = self.normalisation.build_steps(
            proto.normalizer_spec.precompiled_charsmap
        )
        spaces: Any = {"replacement": WORD_MARK, "prepend_scheme": "always"}
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**spaces)]
        )
        last = decoders.Metaspace(**spaces)
        tokenizer.decoder = (
            decoders.Sequence([decoders.ByteFallback(), last]) if self.byte_fallback else last
        )
        if plain:
            return tokenizer
        cls, sep = SPECIAL_PIECES[CLS], SPECIAL_PIECES[SEP]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, CLS), (sep, SEP)],
        )
        tokenizer.add_special_tokens(list(SPECIAL_PIECES))
        return tokenizer

    def count_bytes(self) -> list[int]:
        """UTF-8 bytes of normalised text that each piece stands for; an unknown one counts as 1."""
        return [
            1
            if piece.type in (piece.BYTE, piece.UNKNOWN)
            else len(piece.piece.replace(WORD_MARK, " ").encode())
            for piece in _parse(self.model).pieces
        ]

    def write(self, folder: Path) -> None:
        """Write `spiece.model`, `tokenizer_config.json` and, if needed, `tokenizer.json`.

        What is there already is not written again: a resumed run may have no space for it.
        """
        files: dict[str, bytes] = {MODEL_NAME: self.model}
        config: dict[str, Any] = {
            "tokenizer_class": "AlbertTokenizer",
            "do_lower_case": self.normalisation.lower_case,
            "keep_accents": self.normalisation.keep_accents,
        }
        # What `AlbertTokenizer` cannot do from `spiece.model` alone.
        if self.normalisation.form != "albert" or self.byte_fallback:
            roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
            config |= {
                # AlbertTokenizer would put its own steps in the place of those of tokenizer.json.
                "tokenizer_class": "PreTrainedTokenizerFast",
                "normalization": self.normalisation.form,
                **dict(zip(roles, SPECIAL_PIECES, strict=True)),
                "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            }
            files[TOKENIZER_NAME] = self.build_tokenizer().to_str(pretty=True).encode()
        files[CONFIG_NAME] = (json.dumps(config, indent=2) + "\n").encode()
        for name, content in files.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != content:
                write_file(path, content)

    def write_pieces(self, folder: Path) -> None:
        """Write `spiece.vocab`: a line "piece <tab> score" for each id, for people to read."""
        scores = map(self._processor.get_score, range(self.size))
        lines = [f"{piece}\t{score:g}\n" for piece, score in zip(self.pieces, scores, strict=True)]
        write_file(folder / PIECES_NAME, "".join(lines))


@lru_cache(maxsize=1)
def _reopen(model: bytes, normalisation: Normalisation) -> Vocab:
    """In a worker process, which gets the vocabulary with every piece of work: build it once."""
    return Vocab(model, normalisation)


def read_vocab(location: Path | str, *, sha256: str | None = None) -> Vocab:
    """Read a `spiece.model`, at a path or a URL, with the `tokenizer_config.json` beside it.

    A model that lies alone is normalised as `AlbertTokenizer` does unasked: lower case, no accents.
    Raises UserError if it is no model of ALBERT's, or not the one of `sha256`.
    """
    location = str(location)
    try:
        model = read_bytes(location, MAX_BYTES)
    except (OSError, UserError):
        raise UserError(
            f"{location}: no such file; a vocabulary is a {MODEL_NAME} that "
            "`albert-ds vocab` writes, or `albert-ds import` of a Hugging Face folder"
        ) from None
    if sha256 not in (None, hashlib.sha256(model).hexdigest()):
        raise UserError(f"{location}: not the vocabulary these shards were built with")
    config_at = beside(location, CONFIG_NAME)
    try:
        config = parse_json(read_bytes(config_at, MAX_BYTES + 1), config_at)
    except FileNotFoundError:
        config = {}
    portable = make_portable(model, location)
    normalisation = read_normalisation(config, config_at)
    trained = _parse(portable).normalizer_spec.name
    if trained != normalisation.name and "nfkc-" in f"{trained} {normalisation.name}":
        raise UserError(
            f"{config_at}: {'says' if config else 'is absent, which means'} normalisation "
            f"{normalisation.name}, but {location} was trained under {trained}: keep both files of "
            "one vocabulary together"
        )
    return open_vocab(portable, normalisation, location)


def open_vocab(model: bytes, normalisation: Normalisation, name: str) -> Vocab:
    """The vocabulary of a model; UserError, with `name`, if the libraries cannot use it."""
    try:
        return Vocab(model, normalisation)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise UserError(f"{name}: not a vocabulary of ALBERT's: {error}") from None


def read_normalisation(config: dict, name: str) -> Normalisation:
    """What a `tokenizer_config.json` says; without "normalization" it is AlbertTokenizer's."""
    schema = {"normalization": FORMS, "keep_accents": bool, "do_lower_case": bool}
    check({key: config[key] for key in schema if key in config}, schema, name, is_closed=True)
    form = config.get("normalization", "albert")
    keep_accents = config.get("keep_accents", False)
    if not keep_accents and form != "albert":
        raise UserError(
            f'{name}: keep_accents false: must be true, because "normalization" is "{form}"'
        )
    return Normalisation(
        lower_case=config.get("do_lower_case", True), keep_accents=keep_accents, form=form
    )


def train_vocab(
    sentences: Iterable[str],
    normalisation: Normalisation,
    *,
    vocab_size: int,
    character_coverage: float = 0.99995,
    sample_bytes: int = 1 << 62,
    byte_fallback: bool = False,
    segmented: bool = False,
    seed: int = 0,
) -> Vocab:
    """Train on a stream of sentences, of which a random sample of `sample_bytes` is held in memory.

    SentencePiece sees the text as `Vocab.encode` will give it, and adds no step of its own. The
    sample is drawn here, as SentencePiece's own cannot be seeded: the same text gives the same
    bytes. With `segmented`, WORD_END stands between the words of a sentence, and no piece holds
    characters of two of them. Text that yields fewer than `vocab_size` pieces gives those. Raises
    UserError if it has more characters than that, and whatever `sentences` raises.
    """
    fixed = NUM_FIXED + NUM_BYTES * byte_fallback
    if vocab_size <= fixed:
        raise UserError(f"--vocab-size {vocab_size}: must be over the {fixed} fixed pieces")
    failure: list[Exception] = []  # SentencePiece turns every exception into a RuntimeError
    charsmap = _default_charsmap()

    def normalised() -> Iterator[str]:
        normalise = normalisation.build(charsmap)
        try:
            sample = _draw_sample(sentences, sample_bytes, random.Random(seed))
            while sample:
                words = sample.pop().split(WORD_END) if segmented else [sample.pop()]
                # SentencePiece keeps its own copy.
                yield WORD_END.join(map(normalise, words)).replace(RESERVED, " ")
        except Exception as error:
            failure.append(error)
            raise

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=normalised(),
            model_writer=model,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            hard_vocab_limit=False,
            **TRAINER,
            **(BYTE_FALLBACK if byte_fallback else {}),
            **({"pretokenization_delimiter": WORD_END} if segmented else {}),
        )
    except RuntimeError as error:
        if failure:
            raise failure[0] from None
        raise UserError(_explain(str(error), vocab_size)) from None
    trained = _parse(model.getvalue())
    trained.trainer_spec.ClearField("hard_vocab_limit")  # as ever: the same text, the same bytes
    trained.trainer_spec.input_sentence_size = 10_000_000
    # For readers of spiece.model that know nothing of the steps before it; the name is for ours.
    trained.normalizer_spec.name = normalisation.name
    trained.normalizer_spec.precompiled_charsmap = charsmap
    return Vocab(make_portable(trained.SerializeToString(), "the trained model"), normalisation)


def _draw_sample(sentences: Iterable[str], limit: int, rng: random.Random) -> list[str]:
    """Sentences of `limit` bytes, each with the same probability; all if there are fewer."""
    sample: list[tuple[float, int, str]] = []  # a heap, whose first one leaves first
    size = 0
    highest = 1.0
    for number, sentence in enumerate(sentences):
        if (draw := rng.random()) >= highest:
            continue
        heapq.heappush(sample, (-draw, number, sentence))
        size += len(sentence.encode())
        while size > limit:
            draw, _, last = heapq.heappop(sample)
            size = size - len(last.encode())
            highest = -draw
    return [sentence for _, _, sentence in sorted(sample, key=itemgetter(1))]


def _explain(error: str, vocab_size: int) -> str:
    """SentencePiece's complaint as one line about the flag it concerns."""
    if needed := re.search(r"smaller than required_chars. (\d+) vs (\d+)", error):
        return (
            f"--vocab-size {vocab_size}: this text has {needed[2]} characters and fixed pieces, "
            "and each needs a piece; ask for more pieces, or lower --character-coverage and add "
            "--byte-fallback"
        )
    if "!sentences_.empty()" in error:
        return "--input: the files hold no text"
    return f"SentencePiece cannot train on this text: {error}"


def make_portable(model: bytes, name: str) -> bytes:
    """The same vocabulary, such that every reader of it finds the same best segmentation.

    1. User symbols become ordinary pieces. No other piece contains their characters and their
       score is 0, the best, so SentencePiece segments as before; `AlbertTokenizer` would make
       "added tokens" of them and put a word boundary after each one.
    2. A piece that ends in digit + comma is never used. ALBERT's tokeniser takes the comma off
       such pieces; Hugging Face has done so in some versions and not in others. Nor is the piece
       of a byte, "<0x41>", found in text that spells it, as Hugging Face would do.
    3. Scores are rounded to multiples of 2**-10, so that sums are exact in float32 (SentencePiece)
       and in float64 (Hugging Face) and both break a tie ("0|00" or "00|0") alike.

    Applying it again changes nothing. Raises UserError if the layout is not ALBERT's.
    """
    proto = _parse(model, name)
    first = tuple(piece.piece for piece in proto.pieces[: len(SPECIAL_PIECES)])
    if first != SPECIAL_PIECES:
        raise UserError(f"{name}: its first pieces are {first}, ALBERT's are {SPECIAL_PIECES}")
    for piece in proto.pieces:
        if piece.type == piece.USER_DEFINED:
            piece.type = piece.NORMAL
        is_comma = piece.piece[-1:] == "," and piece.piece[-2:-1].isdigit()
        if is_comma and piece.score > NEVER:
            piece.score += NEVER
        if piece.type == piece.BYTE:
            piece.score = 10 * NEVER
        piece.score = round(piece.score / SCORE_STEP) * SCORE_STEP
    return proto.SerializeToString()


def list_user_pieces(path: Path) -> list[str]:
    """The pieces of a SentencePiece model that its own reader finds before all others."""
    pieces = _parse(path.read_bytes(), str(path)).pieces
    return [piece.piece for piece in pieces if piece.type == piece.USER_DEFINED]


def _parse(model: bytes, name: str = MODEL_NAME):
    """The SentencePiece model as a protocol buffer."""
    try:
        return ModelProto.FromString(model)
    except DecodeError:
        raise UserError(f"{name}: not a SentencePiece model") from None


def _default_charsmap() -> bytes:
    """SentencePiece's map of CHARSMAP, compiled."""
    proto = _parse(
        sentencepiece.SentencePieceNormalizer(rule_name=CHARSMAP).serialized_model_proto()
    )
    return proto.normalizer_spec.precompiled_charsmap
