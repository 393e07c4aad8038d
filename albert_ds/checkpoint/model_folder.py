"""A folder that has a model: a run, one of its checkpoints, an imported one, or Hugging Face's.

Of a pretraining run the newest whole checkpoint is read, as training itself would resume from it;
of a fine-tuning run the best one. Files are read as tensors only; nothing in them is executed.
"""

import pickle
import re
import warnings
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from albert_ds.base.cli import log_line, positive
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import compute_crc32
from albert_ds.base.json_files import build, check, read_json
from albert_ds.base.plugin import check_plugin
from albert_ds.checkpoint.folder import (
    AVERAGE,
    BEST,
    FOLDER_NAME,
    IMPORTED,
    WEIGHTS,
    Checkpoint,
    list_kept,
    open_newest,
)
from albert_ds.data.stream_config import read_schedules, read_varying
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import ModelConfig
from albert_ds.model.hugging_face import ENCODER, Weights, from_hf
from albert_ds.model.shapes import build_shapes
from albert_ds.model.task_heads import HeadConfig
from albert_ds.vocab.tokenizer_json import read_tokenizer_json
from albert_ds.vocab.vocab import CONFIG_NAME, MODEL_NAME, TOKENIZER_NAME, Vocab, read_vocab

HF_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


class ModelFolder:
    """What a command reads of one folder; a command opens it once.

    path      as the user typed it
    root      the folder with config.json and the vocabulary
    is_ours   a run or checkpoint of this project, not a folder of Hugging Face
    record    the content of config.json
    average   read the averaged weights, which a run with --average has
    last      read the mean of this many of a run's newest checkpoints
    needs_mlm_head  refuse weights of Hugging Face without that head, which else is drawn
    """

    def __init__(
        self,
        path: Path | str,
        *,
        average: bool = False,
        last: int = 1,
        needs_mlm_head: bool = False,
    ):
        """Raises UserError if there is no model in the folder."""
        self.path = Path(path)
        self.average = average
        self.average_last = last
        self.needs_mlm_head = needs_mlm_head
        self.is_ours = True
        if not self.path.exists():
            raise UserError(f"{self.path}: no such folder{hint_download(self.path)}")
        if (self.path / "checkpoints").is_dir():
            self.root = self.path
        elif (self.path / WEIGHTS).is_file():
            self.root = self.path.absolute().parent.parent
        elif any((self.path / name).is_file() for name in HF_FILES):
            self.root = self.path
            self.is_ours = False
        else:
            seeds = ", ".join(path.name for path in sorted(self.path.glob("seed-*")))
            hint = f"; name one of {seeds} in it" if seeds else ""
            raise UserError(
                f"{self.path}: neither a run (with checkpoints/) nor a folder with "
                f"{HF_FILES[0]}{hint}"
            )
        self.record = read_json(self.root / "config.json")
        if self.is_ours:
            check_plugin(self.record, str(self.path))

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that is read, proven whole; None for a folder of Hugging Face.

        A line on stderr says so if it is not the newest one. Raises DamagedData if the one that
        is meant, or every one, is damaged, and UserError if there is none.
        """
        if not self.is_ours:
            return None
        shapes = build_shapes(self.config, self.head)
        named = [self.root / name for name in (BEST, IMPORTED) if (self.root / name).is_dir()]
        if self.root != self.path:
            named = [self.path if self.path.name else self.path.absolute()]  # `.` has no name
        if named:
            checkpoint = Checkpoint(named[0])
            if (problem := checkpoint.find_damage(shapes)) is not None:
                raise DamagedData(f"{named[0]}: {problem}")
            return checkpoint
        newest, damaged = open_newest(self.root, shapes)
        for line in damaged:
            log_line(line)
        if newest is None:
            raise UserError(f"{self.path}: a run without a checkpoint")
        return newest

    @property
    def name(self) -> str:
        """What reports call the weights: RUN/step-N by its names, or that of a HF folder."""
        root = self.root.resolve().name
        parts = [f"{root}/{self.checkpoint.path.name}" if self.checkpoint else root]
        if self.average:
            parts.append("average")
        if self.average_last > 1:
            parts.append(f"mean of {self.average_last}")
        return ", ".join(parts)

    @cached_property
    def config(self) -> ModelConfig:
        """The shape of the model; of Hugging Face's, that of its pretraining model."""
        if not self.is_ours:
            return self._pretrained_hf[0]
        name = str(self.root / "config.json")
        check(self.record, {"model": dict}, name)
        return build(ModelConfig, self.record["model"], f"{name}: model")

    @cached_property
    def trained_length(self) -> int:
        """Tokens of the longest sequence that the weights have seen: the vectors of later positions
        are as they were drawn. A run records it as of its first step; those of before it was
        recorded say their --sequence-length."""
        if self.is_ours:
            stream = self.record.get("stream") or {}
            seen = self.record.get("trained_length", stream.get("sequence_length"))
            longest = self.config.max_position_embeddings
            name = str(self.root / "config.json")
            text = read_schedules(self.record, name).get("sequence_length")
            if text is not None and self.checkpoint is not None and isinstance(seen, int):
                check(self.record, {"steps": positive}, name)
                lengths = read_varying("sequence_length", text, self.record["steps"])
                seen = max(seen, lengths.largest(self.checkpoint.record["step"]))
        else:
            path = self.root / CONFIG_NAME
            seen = read_json(path).get("model_max_length") if path.is_file() else None
            schema = {"max_position_embeddings": positive}
            check(self.record, schema, f"{self.path}: config.json")
            longest = self.record["max_position_embeddings"]
        return min(seen, longest) if isinstance(seen, int) and seen > 0 else longest

    @cached_property
    def head(self) -> HeadConfig | None:
        """The head of a fine-tuned model of ours; None for a pretrained one."""
        if not self.is_ours or "head" not in self.record:
            return None
        name = str(self.root / "config.json")
        head = build(HeadConfig, self.record["head"], f"{name}: head")
        reads_pooled = head.row.reads_pooled
        if reads_pooled != self.config.pair_head:
            raise UserError(f"{name}: pair_head must be {reads_pooled} for head {head.kind}")
        return head

    @cached_property
    def vocab(self) -> Vocab:
        """The vocabulary: `spiece.model`, else Hugging Face's `tokenizer.json`, which alone is what
        transformers 5 writes.

        Raises UserError if it is not the one that the model was trained with.
        """
        path = self.root / MODEL_NAME
        if not path.is_file() and (self.root / "vocab.txt").is_file():
            raise UserError(
                f"{self.root}: its vocab.txt is of WordPiece; allowed: {MODEL_NAME} or "
                f"{TOKENIZER_NAME} of SentencePiece's Unigram"
            )
        if not self.is_ours and not path.is_file() and (self.root / TOKENIZER_NAME).is_file():
            path = self.root / TOKENIZER_NAME
            vocab = read_tokenizer_json(path)
        else:
            vocab = read_vocab(path)
        recorded = self.record.get("vocab_sha256")
        if recorded not in (None, vocab.sha256):
            raise UserError(
                f"{path}: its sha256 is {vocab.sha256}, must be {recorded} of config.json: the "
                "weights belong to another vocabulary"
            )
        size = self.config.vocab_size if self.is_ours else self.record.get("vocab_size")
        if vocab.size != size:
            raise UserError(f"{path}: has {vocab.size} pieces, the model's vocab_size is {size}")
        return vocab

    @property
    def has_vocab(self) -> bool:
        return any((self.root / file).is_file() for file in (MODEL_NAME, TOKENIZER_NAME))

    def check_vocab(self, vocab: Vocab, name: str) -> None:
        """Raise UserError, with `name`, unless the model was trained with this vocabulary.

        Weights without a vocabulary beside them say only how many pieces it has.
        """
        if vocab.size != self.config.vocab_size:
            raise UserError(
                f"{name}: its model has {self.config.vocab_size} pieces, the data's vocabulary "
                f"{vocab.size}; they must be the same"
            )
        if not self.has_vocab:
            return
        for number, pair in enumerate(zip(vocab.pieces, self.vocab.pieces, strict=True)):
            if pair[0] != pair[1]:
                raise UserError(
                    f"{name}: its vocabulary has the piece {pair[1]!r} as id {number}, that of the "
                    f"data {pair[0]!r}; they must be the same"
                )

    @property
    def weights_file(self) -> Path:
        if self.average:
            if self.checkpoint is None or AVERAGE not in self.checkpoint.record["crc32"]:
                raise UserError(
                    f"--average: {self.path} has no averaged weights; `train --average` keeps them"
                )
            return self.checkpoint.path / AVERAGE
        if self.checkpoint is not None:
            return self.checkpoint.path / WEIGHTS
        return next(path for name in HF_FILES if (path := self.root / name).is_file())

    @property
    def checksum(self) -> int:
        """CRC-32 of the file of the weights; that of a checkpoint is proven by its state.json."""
        file = self.weights_file
        if self.checkpoint is not None:
            return self.checkpoint.record["crc32"][file.name]
        return compute_crc32(file)

    def read_weights(self) -> Weights:
        """The fp32 tensors of the model, with all its heads, in host memory."""
        if self.average_last > 1:
            return self._read_mean()
        if self.checkpoint is None:
            return self._pretrained_hf[1]
        return self.checkpoint.read(self.weights_file.name)

    def _read_mean(self) -> Weights:
        """The mean of the weights of a run's newest checkpoints, computed in float64."""
        newest = self.checkpoint if self.root == self.path else None
        is_run = newest is not None and FOLDER_NAME.fullmatch(newest.path.name)
        folders = list_kept(self.path / "checkpoints")[: self.average_last] if is_run else []
        if len(folders) < self.average_last:
            raise UserError(
                f"--average-last {self.average_last}: must be a pretraining run with as many "
                f"checkpoints; {self.path} has {len(folders)}"
            )
        total: Weights = {}
        for checkpoint in map(Checkpoint, folders):
            problem = checkpoint.find_damage(build_shapes(self.config, self.head))
            if problem is not None:
                raise DamagedData(f"{checkpoint.path}: {problem}")
            for name, tensor in checkpoint.read(WEIGHTS).items():
                total[name] = total.get(name, 0) + tensor.double()
        return {name: (tensor / self.average_last).float() for name, tensor in total.items()}

    def read_pretrained(self) -> tuple[ModelConfig, Weights]:
        """The config and fp32 weights of a pretraining model; UserError for a fine-tuned one."""
        if self.head is not None:
            kind = self.head.kind
            raise UserError(
                f"{self.path}: a fine-tuned model ({kind}); it has no pretraining heads"
            )
        return self.config, self.read_weights()

    @property
    def encoder_config(self) -> ModelConfig:
        """The shape of the encoder, of weights that are proven whole."""
        if not self.is_ours:
            return self._encoder_hf[0]
        assert self.weights_file  # raises if there is none, or it is damaged
        return self.config

    def read_encoder(self) -> tuple[ModelConfig, Weights]:
        """The config and fp32 encoder, with its pooler if there is one, of any model."""
        if not self.is_ours:
            return self._encoder_hf
        weights = self.read_weights()
        return self.config, {name: x for name, x in weights.items() if name.startswith(ENCODER)}

    def build_model(self) -> AlbertForPretraining:
        """The pretraining model: fp32, on the CPU."""
        config, weights = self.read_pretrained()
        with torch.device("meta"):
            model = AlbertForPretraining(config)
        model.load_state_dict(weights, assign=True)
        return model

    @cached_property
    def _encoder_hf(self) -> tuple[ModelConfig, Weights]:
        return self._read_hf(encoder_only=True)

    @cached_property
    def _pretrained_hf(self) -> tuple[ModelConfig, Weights]:
        return self._read_hf(encoder_only=False)

    def _read_hf(self, *, encoder_only: bool) -> tuple[ModelConfig, Weights]:
        tensors = _read_foreign(self.weights_file)
        return from_hf(
            self.record,
            tensors,
            str(self.path),
            encoder_only=encoder_only,
            needs_mlm_head=self.needs_mlm_head,
        )


def hint_download(path: Path) -> str:
    """How to get a model that was named as the Hub names it; empty for other names."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        return ""
    return f"; of the Hub's model: hf download {path} --local-dir {path.name}, and name {path.name}"


def _read_foreign(path: Path) -> Weights:
    """The tensors of a file that another program wrote. Raises UserError."""
    if path.suffix == ".json":  # a table of several files
        table = read_json(path)
        check(table, {"weight_map": dict}, str(path))
        names = sorted({Path(str(name)).name for name in table["weight_map"].values()})
        if wrong := [name for name in names if not name or "\0" in name]:
            raise UserError(f"{path}: weight_map: {wrong[0]!r}: must be the name of a file")
        return {k: x for name in names for k, x in _read_foreign(path.with_name(name)).items()}
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own words advise to run what is in the file
        raise UserError(f"{path}: not a file of tensors: it would run code; use another") from None
    except (OSError, EOFError, SafetensorError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{path}: not a file of tensors: {first_line}") from None
    if not isinstance(content, dict) or not all(map(_is_entry, content.items())):
        raise UserError(
            f"{path}: not a file of tensors: must be a state dict, of names and dense real tensors"
        )
    # Tensors of torch's own files may be transposed, expanded, or have one storage.
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in content.items()}


def _is_entry(entry: tuple[object, object]) -> bool:
    name, x = entry
    is_plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta
    return isinstance(name, str) and is_plain and not x.is_quantized and not x.is_complex()
