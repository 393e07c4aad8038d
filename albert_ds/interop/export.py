"""A run or checkpoint -> a Hugging Face folder, and back.

A folder is written beside its place and renamed when it is complete and checked: an export that
fails leaves nothing.
"""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from albert_ds.base.cli import log_line, positive
from albert_ds.base.errors import MachineFailed, UserError
from albert_ds.base.files import check_folder, new_folder, write_json
from albert_ds.base.json_files import check, read_json, read_lines
from albert_ds.checkpoint.folder import IMPORTED, WEIGHTS, list_kept, step_of, write_folder
from albert_ds.checkpoint.model_folder import HF_FILES, ModelFolder
from albert_ds.checkpoint.origin import describe_start, find_languages
from albert_ds.interop.card import write_card
from albert_ds.interop.check import check_export
from albert_ds.model.hugging_face import task_to_hf, to_hf
from albert_ds.vocab.vocab import CONFIG_NAME, TOKENIZER_NAME

POSITIONS = "albert.embeddings.position.weight"


def export_hf(
    folder: ModelFolder,
    output: Path,
    *,
    max_length: int | None,
    licence: str | None,
    probes: list[dict],
    precision: str = "fp32",
) -> None:
    """Write the model of a folder as a Hugging Face folder, with its first `max_length` positions.

    Its tokenizer cuts texts to the longest sequence that the weights have seen. Its card names the
    licence, and has the numbers of those reports of `albert-ds probe` that are about these weights.
    If transformers is installed, it loads what was written; its logits and its token ids must be
    ours. Raises UserError, and leaves `output` as it was, if they are not. `precision` is that of
    the file; what is rounded is compared before and after.
    """
    check_folder(output, [folder.root], names=["checkpoints"])
    config = folder.config
    head = folder.head
    state = folder.read_weights()
    if max_length is not None:
        if max_length > config.max_position_embeddings:
            raise UserError(
                f"--max-length {max_length}: {folder.path} has {config.max_position_embeddings} "
                "positions; must be at most that"
            )
        config = replace(config, max_position_embeddings=max_length)
        state = state | {POSITIONS: state[POSITIONS][:max_length].clone()}
    trained_length = min(folder.trained_length, config.max_position_embeddings)
    if head is None:
        hf_config, hf_state = to_hf(config, state)
    else:
        hf_config, hf_state = task_to_hf(config, head, state, f"--checkpoint {folder.path}")
    with new_folder(output) as partial:
        folder.vocab.write(partial)
        folder.vocab.build_tokenizer().save(str(partial / TOKENIZER_NAME))
        # Without these AlbertTokenizer returns no segments and does not know the longest sequence.
        settings = read_json(partial / CONFIG_NAME)
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        settings["model_max_length"] = trained_length
        write_json(partial / CONFIG_NAME, settings)
        write_json(partial / "config.json", hf_config)
        # Shared blocks are one tensor under several names, which the format does not take.
        copies = {name: tensor.clone() for name, tensor in hf_state.items()}
        _save(copies, partial)
        checked = check_export(partial, folder, config, state, "fp32")
        if precision == "bf16":
            rounded = {name: tensor.bfloat16() for name, tensor in copies.items()}
            _save(rounded, partial)
            checked += " Its weights were rounded after that; transformers computes in fp32. "
            checked += check_export(partial, folder, config, state, "bf16")
        own_probes = [probe for probe in probes if probe["weights"] == folder.name]
        (kind,) = hf_config["architectures"]
        card = write_card(folder, config, state, kind, trained_length, licence, own_probes, checked)
        (partial / "README.md").write_text(card, encoding="utf-8")


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        save_file(tensors, folder / HF_FILES[0], metadata={"format": "pt"})
    except SafetensorError as error:  # its name for any error of the disk
        raise MachineFailed(f"{folder / HF_FILES[0]}: cannot be written: {error}") from None


def open_checkpoints(run: Path, *, average: bool) -> list[ModelFolder]:
    """All checkpoints RUN/checkpoints/step-N of a run, oldest first, proven whole.

    Raises UserError if there is none, DamagedData if one is damaged.
    """
    try:
        kept = list_kept(run / "checkpoints")
    except OSError:
        kept = []
    if not kept:
        raise UserError(f"--checkpoint {run}: must be a run, with folders checkpoints/step-N")
    folders = [ModelFolder(checkpoint, average=average) for checkpoint in reversed(kept)]
    for folder in folders:
        assert folder.checkpoint  # reads it, and raises if it is damaged
    return folders


def open_revisions(run: Path, output: Path, *, average: bool) -> dict[Path, ModelFolder]:
    """The checkpoints of a run by the folder that each is exported to, in `output`.

    It is chck_1M for the step that reached the first million words of --save-at-words, as BabyLM
    names revisions, else step-N. Raises UserError if such a folder holds anything.
    """
    folders = {step_of(x.path): x for x in open_checkpoints(run, average=average)}
    names: dict[int, list[str]] = {}
    for name, step in _find_milestones(run).items():
        if step in folders:
            names.setdefault(step, []).append(name)
        else:
            why = "not reached" if step is None else f"the checkpoint of step {step} is not there"
            log_line(f"{name}: {why}; it is left out")
    revisions = {
        output / name: folder
        for step, folder in folders.items()
        for name in names.get(step, [folder.path.name])
    }
    for place, folder in revisions.items():
        check_folder(place, [folder.root])
    return revisions


def _find_milestones(run: Path) -> dict[str, int | None]:
    """Revision -> the step that reached its number of words, which wrote a line of metrics."""
    wanted = read_json(run / "config.json").get("save_at_words") or []
    check(wanted, [positive], f"{run / 'config.json'}: save_at_words")
    lines = read_lines(run / "metrics.jsonl") if wanted else []
    reached = [(x["step"], x["words"]) for x in lines if isinstance(x.get("words"), int)]
    return {
        f"chck_{number / 1e6:.15g}M": next((step for step, n in reached if n >= number), None)
        for number in wanted
    }


def read_probes(paths: list[Path], folders: list[ModelFolder]) -> list[dict]:
    """Reports of `albert-ds probe`. Raises UserError for one that is not about these models."""
    probes = []
    names = [folder.name for folder in folders]
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
    """Write a Hugging Face folder as `checkpoints/imported` of this project, and read it back."""
    check_folder(output, [folder.path], names=["checkpoints"])
    for line in describe_start(folder, {}):
        log_line(line)
    config, state = folder.read_pretrained()
    with new_folder(output) as partial:
        folder.vocab.write(partial)
        record = {
            "model": asdict(config),
            "vocab_sha256": folder.vocab.sha256,
            "trained_length": folder.trained_length,
            "init_from": str(folder.path),
            "language": sorted(find_languages(folder, {})),
        }
        write_json(partial / "config.json", record)
        write_folder(partial / IMPORTED, {WEIGHTS: state}, {"step": 0})
        written = ModelFolder(partial)
        assert written.vocab.pieces == folder.vocab.pieces and written.config == config
        assert all(torch.equal(x, state[name]) for name, x in written.read_weights().items())
