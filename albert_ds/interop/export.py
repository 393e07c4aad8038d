"""A run or checkpoint -> a Hugging Face folder, and back.

A folder is written beside its place and renamed when it is complete and checked: an export that
fails leaves nothing.
"""

import json
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from albert_ds.checkpoint.folder import WEIGHTS, list_checkpoints
from albert_ds.cli import log_line
from albert_ds.data.vocab import CONFIG_NAME, SPECIAL_PIECES, TOKENIZER_NAME, Vocab
from albert_ds.errors import MachineFailed, UserError
from albert_ds.files import refuse_input
from albert_ds.interop.card import Source, write_card
from albert_ds.interop.hugging_face import task_to_hf
from albert_ds.interop.weights import (
    HF_FILES,
    find_weights,
    name_weights,
    read_model_vocab,
    read_native,
    read_weights,
    to_hf,
)
from albert_ds.json_files import check, read_json
from albert_ds.model.config import ModelConfig
from albert_ds.settings.finetune import describe_command as describe_finetuning
from albert_ds.settings.pretrain import describe_command as describe_pretraining

UNCHECKED = (
    "transformers is not installed, so the export was not compared with Hugging Face's ALBERT"
)


def export_hf(
    checkpoint: Path, output: Path, *, licence: str | None = None, probes: Iterable[dict] = ()
) -> None:
    """Write a run or checkpoint as a Hugging Face folder.

    Its card names the licence, and has the numbers of those reports of tools/probe.py that are
    about these weights. Where transformers is installed, it loads what was written; its logits and
    its token ids must be ours. Raises UserError, and leaves `output` as it was, where they are not.
    """
    from safetensors.torch import save_file

    root, weights = find_weights(checkpoint)
    refuse_input(output, [root])
    run: dict = {}
    if weights.name == WEIGHTS:
        config, head, state = read_native(checkpoint)
        run = read_json(root / "config.json")
    else:
        (config, state), head = read_weights(checkpoint), None
    if head is None:
        hf_config, hf_state = to_hf(config, state)
    else:
        hf_config, hf_state = task_to_hf(config, head, state, f"--checkpoint {checkpoint}")
    vocab = read_model_vocab(checkpoint)
    _require_size(vocab, config, root)
    with write_folder(output) as folder:
        _write_tokenizer(vocab, config, folder)
        _write_json(folder / "config.json", hf_config)
        # Shared blocks are one tensor under several names, which the format does not take.
        copies = {name: tensor.clone() for name, tensor in hf_state.items()}
        save_file(copies, folder / HF_FILES[0], metadata={"format": "pt"})
        if problem := _check_tokenizer(vocab, folder) or _check_model(folder, config, head, state):
            raise UserError(f"--checkpoint {checkpoint}: not exported: {problem}")
        name = name_weights(checkpoint)
        source = Source(
            root=root,
            checkpoint=weights.parent.name if run else "",
            run=run,
            normalisation=vocab.normalisation,
            command=_describe_command(run),
            licence=licence,
            probes=tuple(probe for probe in probes if probe["weights"] == name),
        )
        num_params = sum(tensor.numel() for tensor in state.values())
        card = write_card(config, head, num_params, source, _describe_check())
        (folder / "README.md").write_text(card, encoding="utf-8")
    if not _has_transformers():
        log_line(f"{UNCHECKED}; pip install 'albert-ds[hf]'")


def list_checkpoints_of(run: Path) -> list[Path]:
    """The folders RUN/checkpoints/step-N of a run, oldest first; UserError where there is none."""
    try:
        found = list_checkpoints(run / "checkpoints")
    except OSError:
        found = []
    if not found:
        raise UserError(f"--checkpoint {run}: must be a run, with folders checkpoints/step-N")
    return found[::-1]


def read_probes(paths: Iterable[Path], checkpoints: Iterable[Path]) -> list[dict]:
    """Reports of tools/probe.py. Raises UserError for one that is not about these checkpoints."""
    probes, names = [], [name_weights(checkpoint) for checkpoint in checkpoints]
    for path in paths:
        probe = read_json(path, f"--probe {path}")
        check(probe, {"weights": str, "data": str}, f"--probe {path}")
        if probe["weights"] not in names:
            raise UserError(
                f"--probe {path}: is about {probe['weights']}; exported: {', '.join(names)}"
            )
        probes.append(probe)
    return probes


def _describe_command(run: dict) -> str:
    """The command that started a run; "" where config.json does not hold enough to say it."""
    with suppress(KeyError):
        return describe_finetuning(run) if "task" in run else describe_pretraining(run)
    return ""


def import_hf(folder: Path, output: Path) -> None:
    """Write a Hugging Face folder as a checkpoint of this project, at step 0."""
    from safetensors.torch import save_file

    refuse_input(output, [folder])
    config, state = read_weights(folder)
    vocab = read_model_vocab(folder)
    _require_size(vocab, config, folder)
    with write_folder(output) as partial:
        vocab.write(partial)
        _write_json(
            partial / "config.json", {"model": asdict(config), "vocab_sha256": vocab.sha256}
        )
        step = partial / "checkpoints" / "step-00000000"
        step.mkdir(parents=True)
        save_file(state, step / WEIGHTS)
        (step.parent / "latest").write_text(step.name + "\n")


@contextmanager
def write_folder(output: Path) -> Generator[Path]:
    """A folder beside `output` that takes its place when the block ends without an error.

    Where `output` exists, files of the same name are replaced one by one and others stay. Raises
    UserError where `output` holds checkpoints or cannot be made, MachineFailed where writing fails.
    """
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

    from albert_ds.interop.check import TOLERANCE

    return (
        f"Checked at export: transformers {transformers.__version__} computes the same logits "
        f"within {TOLERANCE:.0e} (random ids, several lengths, float64) and the same token ids."
    )


def _check_tokenizer(vocab: Vocab, folder: Path) -> str | None:
    """None where Hugging Face's tokenizer gives our ids: for the text of every piece, and for the
    same in upper case with an accent."""
    if not _has_transformers():
        return None
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


def _check_model(folder: Path, config, head, state) -> str | None:
    """None where Hugging Face's model computes our logits."""
    if not _has_transformers():
        return None
    from transformers.utils import logging

    from albert_ds.interop.check import compare_with_hf

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return compare_with_hf(folder, config, head, state)
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _require_size(vocab: Vocab, config: ModelConfig, root: Path) -> None:
    if vocab.size != config.vocab_size:
        raise UserError(
            f"{root}: its vocabulary has {vocab.size} pieces, the model's vocab_size is "
            f"{config.vocab_size}"
        )


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
