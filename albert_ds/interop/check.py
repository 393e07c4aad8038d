"""Whether Hugging Face's ALBERT computes what ours does: token ids, and logits of one batch.

Both models run in float64, so that rounding stays far below the tolerance at every size and a
difference means another function or other weights.
Shapes: B sequences, N tokens, T longest sequence, H hidden, L layers.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.data.micro_batch import concatenate
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import ModelConfig
from albert_ds.model.hugging_face import Weights
from albert_ds.model.task_heads import AlbertForTask, HeadConfig
from albert_ds.vocab.vocab import SPECIAL_PIECES, Vocab

LENGTHS = (3, 17, 33, 60)  # CHOICES of them, so that they can be the options of one question
TOLERANCE = 1e-5  # of logits and hidden states, absolute
# Of logits whose weights are rounded to bf16, as a share of the logits' size. A weight is off by at
# most 1/512 of itself, at random; the three layers of tools/demo/model made 0.006 of that.
ROUNDED = 0.05


def check_export(exported: Path, folder: ModelFolder, config: ModelConfig, state: Weights) -> str:
    """Compare what was written to `exported` with our model; what a card says about that.

    Raises UserError if a token id or a logit differs, or if transformers cannot read it.
    """
    if find_spec("transformers") is None:
        what = "transformers is not installed, so it was not compared with Hugging Face's ALBERT"
        log_line(f"{what}; pip install 'albert-ds[hf]'")
        return f"Not checked: {what}."
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        problem = compare_tokenizers(folder.vocab, exported)
        problem = problem or compare_with_hf(exported, config, folder.head, state)
    except (ValueError, RuntimeError) as error:  # what it makes of a file that cannot be read
        text = " ".join(str(error).split())[:200]
        problem = f"transformers {transformers.__version__} cannot read it: {text}"
    if problem:
        raise UserError(f"--checkpoint {folder.path}: not exported: {problem}")
    return (
        f"Checked at export: transformers {transformers.__version__} computes the same logits "
        f"within {TOLERANCE:.0e} (random ids, several lengths, float64) and the same token ids."
    )


def check_rounded(exported: Path, folder: ModelFolder, config: ModelConfig, state: Weights) -> str:
    """Compare what was written to `exported` in bf16 with our fp32 model; the card's sentence.

    Raises UserError if the root mean square of a logit's difference is over ROUNDED of the
    logits' own, or of 1 where they are smaller.
    """
    if find_spec("transformers") is None:
        return " Its weights are rounded to bf16; what that changes was not checked."
    expected, _, found, _ = run_both(exported, config, folder.head, state)
    shares = {}
    for name, logits in expected.items():
        size = max(logits.square().mean().sqrt().item(), 1.0)
        shares[name] = (found[name] - logits).square().mean().sqrt().item() / size
    name = max(shares, key=lambda name: shares[name])
    if not shares[name] <= ROUNDED:
        raise UserError(
            f"--precision bf16: {folder.path}: not exported: rounded, its {name} differ by "
            f"{shares[name]:.1%} of their size, over {ROUNDED:.0%}; --precision fp32 keeps them"
        )
    return (
        " That was before its weights were rounded to bf16: logits then differ by "
        f"{shares[name]:.1%} of their size. transformers computes in fp32, as config.json says."
    )


def compare_tokenizers(vocab: Vocab, exported: Path) -> str | None:
    """None if Hugging Face's tokenizer gives our ids: for the text of every piece, and for the
    same in upper case with an accent."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, local_files_only=True)
    assert tokenizer is not None
    pieces = map(vocab.decode, ([number] for number in range(len(SPECIAL_PIECES), vocab.size)))
    texts = [form for text in pieces if text for form in (text, text.upper() + "\u0301")]
    theirs = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for text, ours, found in zip(texts, vocab.encode(texts), theirs, strict=True):
        if ours != found:
            return f"its tokenizer encodes {text!r} as {found}, ours as {ours}"
    return None


def compare_with_hf(
    folder: Path, config: ModelConfig, head: HeadConfig | None, state: Weights
) -> str | None:
    """Load what was written to `folder` with transformers and run both models on the same batch.

    Returns None if all logits agree within TOLERANCE, else one line that says what differs, with
    the first layer whose hidden states do.
    """
    expected, states, found, their_states = run_both(folder, config, head, state)
    differences = {name: distance(found[name], logits) for name, logits in expected.items()}
    worst = max(differences, key=lambda name: differences[name])
    if differences[worst] <= TOLERANCE:
        return None
    message = f"its {worst} differ by {differences[worst]:.1e} from ours, over {TOLERANCE:.0e}"
    for layer, pair in enumerate(zip(states, their_states, strict=True)):
        if distance(*pair) > TOLERANCE:
            where = f"in layer {layer} of {config.num_layers}" if layer else "in the embedding"
            return f"{message}; the hidden states differ first {where}"
    return f"{message}; all hidden states agree, so the head differs"


def run_both(
    folder: Path, config: ModelConfig, head: HeadConfig | None, state: Weights
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor], list[Tensor]]:
    """Logits and hidden states of one batch, ours and those of transformers, both in float64.

    Raises ValueError if transformers finds other tensors in `folder` than it needs.
    """
    import transformers

    lengths = [min(length, config.max_position_embeddings) for length in LENGTHS]
    batch = draw_batch(config, lengths)
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    theirs, loading = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, local_files_only=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := loading[problem]:
            raise ValueError(
                f"{kind} loads it with {problem.replace('_', ' ')}: {sorted(names)[0]}"
            )
    with torch.no_grad():
        return (
            *run_ours(config, head, state, batch),
            *run_theirs(theirs.eval(), head, batch, lengths),
        )


def draw_batch(config: ModelConfig, lengths: list[int]) -> dict:
    """Random sequences of these lengths end to end, each of two segments, never <pad>.

    The positions of the last one are spread over the whole table.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, config.vocab_size, (sum(lengths),), generator=generator)
    batch = concatenate([x.numpy() for x in ids.split(lengths)], [n // 2 + 1 for n in lengths])
    batch["token_type_ids"].clamp_(max=config.type_vocab_size - 1)
    spread = torch.linspace(0, config.max_position_embeddings - 1, lengths[-1])
    batch["position_ids"][-lengths[-1] :] = spread.long()
    return batch


def run_ours(
    config: ModelConfig, head: HeadConfig | None, state: Weights, batch: dict
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Our logits by Hugging Face's names, and the L + 1 hidden states [N, H]."""
    model = AlbertForPretraining(config) if head is None else AlbertForTask(config, head)
    model.load_state_dict(state)
    model = model.double().eval()
    encoded = model.albert(**batch)
    if isinstance(model, AlbertForTask):
        found = model.head(encoded, batch["cu_seqlens"], batch["max_seqlen"])
        names = {"logits": "logits", "start": "start_logits", "end": "end_logits"}
        return {names[name]: x for name, x in found.items()}, encoded["hidden_states"]
    word = model.albert.embeddings.word.weight
    logits = {"prediction_logits": model.mlm_head.logits(encoded["last_hidden_state"], word)}
    if model.pair_head is not None:
        logits["sop_logits"] = model.pair_head(encoded["pooled"])
    return logits, encoded["hidden_states"]


def run_theirs(
    model, head: HeadConfig | None, batch: dict, lengths: list[int]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Hugging Face's logits, of real tokens alone, and hidden states [N, H]."""
    padded = {
        name: torch.nn.utils.rnn.pad_sequence(batch[name].split(lengths), batch_first=True)
        for name in ("input_ids", "token_type_ids", "position_ids")
    }
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [B, T]
    inputs = {**padded, "attention_mask": real.long()}
    if head is not None and head.row.choices > 1:
        inputs = {name: x.unsqueeze(0) for name, x in inputs.items()}
    out = model(**inputs, output_hidden_states=True)
    found = {name: x for name, x in out.items() if name.endswith("logits")}
    logits = {n: x[real] if x.shape[:2] == real.shape else x for n, x in found.items()}
    if head is None and "logits" in logits:  # AlbertForMaskedLM
        logits = {"prediction_logits": logits["logits"]}
    return logits, [x[real] for x in out.hidden_states]


def distance(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference; infinite if shapes differ or a value is no number."""
    if x.shape != y.shape:
        return float("inf")
    difference = (x.double() - y.double()).abs().max().item()
    return difference if difference == difference else float("inf")
