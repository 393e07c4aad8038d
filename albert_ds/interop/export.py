"""A run or checkpoint -> a Hugging Face folder, and back.

A folder is written beside its place and renamed when it is complete and checked: an export that
fails leaves nothing.
"""

import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from albert_ds.checkpoint.folder import IMPORTED, WEIGHTS, list_checkpoints
from albert_ds.checkpoint.folder import write_folder as write_checkpoint
from albert_ds.data.vocab import CONFIG_NAME, TOKENIZER_NAME
from albert_ds.errors import MachineFailed, UserError
from albert_ds.files import refuse_input, write_json
from albert_ds.interop.card import write_card
from albert_ds.interop.check import check_export
from albert_ds.interop.folder import HF_FILES, ModelFolder
from albert_ds.interop.hugging_face import task_to_hf, to_hf
from albert_ds.json_files import check, read_json


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
        folder.vocab.write(partial)
        folder.vocab.build_tokenizer().save(str(partial / TOKENIZER_NAME))
        # Without these AlbertTokenizer returns no segments and does not know the longest sequence.
        settings = read_json(partial / CONFIG_NAME)
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        settings["model_max_length"] = config.max_position_embeddings
        write_json(partial / CONFIG_NAME, settings)
        write_json(partial / "config.json", hf_config)
        # Shared blocks are one tensor under several names, which the format does not take.
        copies = {name: tensor.clone() for name, tensor in hf_state.items()}
        save_file(copies, partial / HF_FILES[0], metadata={"format": "pt"})
        checked = check_export(partial, folder, state)
        mine = [probe for probe in probes if probe["weights"] == folder.name]
        card = write_card(folder, state, licence, mine, checked)
        (partial / "README.md").write_text(card, encoding="utf-8")


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
        write_json(partial / "config.json", record)
        write_checkpoint(partial / IMPORTED, {WEIGHTS: state}, {"step": 0})


@contextmanager
def write_folder(output: Path) -> Generator[Path]:
    """A folder beside `output` that takes its place when the block ends without an error.

    If `output` exists, files of the same name are replaced one by one and others stay. Raises
    UserError if `output` holds checkpoints or cannot be made, MachineFailed if writing fails.
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
        umask = os.umask(0)
        os.umask(umask)
        for path in partial.rglob("*.safetensors"):  # which that library opens to their owner alone
            path.chmod(0o666 & ~umask)
        if not output.exists():
            partial.rename(output)
        else:
            for path in sorted(partial.iterdir()):
                path.replace(output / path.name)
    except OSError as error:
        raise MachineFailed(f"could not write {output} ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
