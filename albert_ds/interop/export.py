"""A run or checkpoint -> a Hugging Face folder, and back.

A folder is written beside its place and renamed when it is complete and checked: an export that
fails leaves nothing.
"""

import json
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import save_file

from albert_ds.checkpoint.folder import IMPORTED, WEIGHTS, list_checkpoints
from albert_ds.checkpoint.folder import write_folder as write_checkpoint
from albert_ds.cli import log_line
from albert_ds.data.vocab import CONFIG_NAME, SPECIAL_PIECES, TOKENIZER_NAME, Vocab
from albert_ds.errors import MachineFailed, UserError
from albert_ds.files import refuse_input
from albert_ds.interop.card import write_card
from albert_ds.interop.check import TOLERANCE, compare_with_hf
from albert_ds.interop.folder import HF_FILES, ModelFolder
from albert_ds.interop.hugging_face import Weights, task_to_hf, to_hf
from albert_ds.json_files import check, read_json
from albert_ds.model.config import ModelConfig

UNCHECKED = (
    "transformers is not installed, so the export was not compared with Hugging Face's ALBERT"
)


def export_hf(
    folder: ModelFolder, output: Path, *, licence: str | None = None, probes: Sequence[dict] = ()
) -> None:
    """Write the model of a folder as a Hugging Face folder.

    Its card names the licence, and has the numbers of those reports of `albert-ds probe` that are
    about these weights. If transformers is installed, it loads what was written; its logits and
    its token ids must be ours. Raises UserError, and leaves `output` as it was, if they are not.
    """
    refuse_input(output, [folder.root])
    config, head, state = folder.config, folder.head, folder.read_weights()
    if head is None:
        hf_config, hf_state = to_hf(config, state)
    else:
        hf_config, hf_state = task_to_hf(config, head, state, f"--checkpoint {folder.path}")
    with write_folder(output) as partial:
        _write_tokenizer(folder.vocab, config, partial)
        _write_json(partial / "config.json", hf_config)
        # Shared blocks are one tensor under several names, which the format does not take.
        copies = {name: tensor.clone() for name, tensor in hf_state.items()}
        save_file(copies, partial / HF_FILES[0], metadata={"format": "pt"})
        if problem := _find_difference(partial, folder, state):
            raise UserError(f"--checkpoint {folder.path}: not exported: {problem}")
        mine = [probe for probe in probes if probe["weights"] == folder.name]
        card = write_card(folder, state, licence, mine, _describe_check())
        (partial / "README.md").write_text(card, encoding="utf-8")
    if not _has_transformers():
        log_line(f"{UNCHECKED}; pip install 'albert-ds[hf]'")


def open_checkpoints(run: Path) -> list[ModelFolder]:
    """All checkpoints RUN/checkpoints/step-N of a run, oldest first, proven whole.

    Raises UserError if there is none, DamagedData if one is damaged.
    """
    try:
        found = list_checkpoints(run / "checkpoints")
    except OSError:
        found = []
    if not found:
        raise UserError(f"--checkpoint {run}: must be a run, with folders checkpoints/step-N")
    folders = [ModelFolder(checkpoint) for checkpoint in reversed(found)]
    for folder in folders:
        assert folder.checkpoint  # reads it, and raises if it is damaged
    return folders


def read_probes(paths: list[Path], folders: list[ModelFolder]) -> list[dict]:
    """Reports of `albert-ds probe`. Raises UserError for one that is not about these models."""
    probes, names = [], [folder.name for folder in folders]
    for path in paths:
        probe = read_json(path, f"--probe {path}")
        check(probe, {"weights": str, "data": str}, f"--probe {path}")
        if probe["weights"] not in names:
            raise UserError(
                f"--probe {path}: is about {probe['weights']}; exported: {', '.join(names)}"
            )
        probes.append(probe)
    return probes


def import_hf(folder: ModelFolder, output: Path) -> None:
    """Write a Hugging Face folder as `checkpoints/imported` of this project."""
    refuse_input(output, [folder.path])
    config, state = folder.read_pretrained()
    with write_folder(output) as partial:
        folder.vocab.write(partial)
        record = {"model": asdict(config), "vocab_sha256": folder.vocab.sha256}
        _write_json(partial / "config.json", record)
        write_checkpoint(partial / IMPORTED, {WEIGHTS: state}, {"step": 0})


@contextmanager
def write_folder(output: Path) -> Generator[Path]:
    """A folder beside `output` that takes its place when the block ends without an error.

    Where `output` exists, files of the same name are replaced one by one and others stay. Raises
    UserError where `output` holds checkpoints or cannot be made, MachineFailed where writing fails.
    """
    output = Path(os.path.abspath(output))  # `.` has no name
    if not output.name:
        raise UserError(f"--output {output}: must be a folder in another one")
    if (output / "checkpoints").exists():
        raise UserError(f"--output {output}: holds checkpoints; name another folder")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: exists and is not a folder")
    if output.is_dir() and not os.access(output, os.W_OK):
        raise UserError(f"--output {output}: may not be written to")
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from None
    try:
        yield partial
        _open_to_readers(partial)
        if not output.exists():
            partial.rename(output)
        else:
            for path in sorted(partial.iterdir()):
                path.replace(output / path.name)
    except OSError as error:
        raise MachineFailed(f"could not write {output} ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """Give every file the usual mode: safetensors writes them for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def _write_tokenizer(vocab: Vocab, config: ModelConfig, folder: Path) -> None:
    """`spiece.model`, `tokenizer.json`, `tokenizer_config.json`."""
    vocab.write(folder)
    vocab.build_tokenizer().save(str(folder / TOKENIZER_NAME))
    # Without these AlbertTokenizer returns no segments and does not know the longest sequence.
    settings = read_json(folder / CONFIG_NAME)
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    settings["model_max_length"] = config.max_position_embeddings
    _write_json(folder / CONFIG_NAME, settings)


def _has_transformers() -> bool:
    return find_spec("transformers") is not None


def _describe_check() -> str:
    if not _has_transformers():
        return f"Not checked: {UNCHECKED}."
    import transformers

    return (
        f"Checked at export: transformers {transformers.__version__} computes the same logits "
        f"within {TOLERANCE:.0e} (random ids, several lengths, float64) and the same token ids."
    )


def _find_difference(partial: Path, folder: ModelFolder, state: Weights) -> str | None:
    """What Hugging Face makes of an export that we do not; None without transformers."""
    if not _has_transformers():
        return None
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return _compare_tokenizer(folder.vocab, partial) or compare_with_hf(
            partial, folder.config, folder.head, state
        )
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _compare_tokenizer(vocab: Vocab, folder: Path) -> str | None:
    """None if Hugging Face's tokenizer gives our ids: for the text of every piece, and for the
    same in upper case with an accent."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer is not None
    pieces = map(vocab.decode, ([number] for number in range(len(SPECIAL_PIECES), vocab.size)))
    texts = [form for text in pieces if text for form in (text, text.upper() + "\u0301")]
    theirs = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for text, ours, found in zip(texts, vocab.encode(texts), theirs, strict=True):
        if ours != found:
            return f"its tokenizer encodes {text!r} as {found}, ours as {ours}"
    return None


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
