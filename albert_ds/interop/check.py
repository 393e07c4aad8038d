"""Whether Hugging Face's ALBERT gives the token ids and logits that ours gives, in float64."""

from importlib.util import find_spec
from pathlib import Path

import torch

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import ModelConfig
from albert_ds.model.hugging_face import Weights
from albert_ds.model.task_heads import AlbertForTask
from albert_ds.vocab.vocab import SPECIAL_PIECES, Vocab

LIMITS = {"fp32": 1e-6, "bf16": 0.05}  # of a difference, as a share of the logits' size; both RMS


def check_export(
    exported: Path, folder: ModelFolder, config: ModelConfig, state: Weights, precision: str
) -> str:
    """Compare what was written to `exported` with our weights; what a card says about that.

    Raises UserError if a token id or a logit differs, or if transformers cannot read it.
    """
    if find_spec("transformers") is None:
        reason = "transformers is not installed, so it was not compared with Hugging Face's ALBERT"
        log_line(f"{reason}; pip install 'albert-ds[hf]'")
        return f"Not checked: {reason}."
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AlbertForTask(config, folder.head) if folder.head else AlbertForPretraining(config)
    model.load_state_dict(state)
    try:
        problem = compare_token_ids(folder.vocab, exported)
        shares = compare_logits(model.double().eval(), exported)
    except (ValueError, RuntimeError) as error:  # what it makes of a file that cannot be read
        text = " ".join(str(error).split())[:200]
        problem = f"transformers {transformers.__version__} cannot read it: {text}"
        shares = {}
    for name, share in shares.items():
        if not share <= LIMITS[precision]:  # or no number
            problem = problem or f"its {name} differ from ours by {share:.1e} of their size"
    if problem:
        advice = "" if precision == "fp32" else "; --precision fp32 rounds nothing"
        raise UserError(f"--checkpoint {folder.path}: not exported: {problem}{advice}")
    return (
        f"Checked at export: transformers {transformers.__version__} finds the same token ids, and "
        f"from these weights ({precision}), in float64 and for random ids, logits that differ from "
        f"ours by {max(shares.values()):.1g} of their size."
    )


def compare_token_ids(vocab: Vocab, exported: Path) -> str | None:
    """The first difference: of the text of each piece, and of the same in accented capitals."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, local_files_only=True)
    assert tokenizer is not None
    pieces = map(vocab.decode, ([number] for number in range(len(SPECIAL_PIECES), vocab.size)))
    texts = [form for text in pieces if text for form in (text, text.upper() + "\u0301")]
    hf_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for text, ids, others in zip(texts, vocab.encode(texts), hf_ids, strict=True):
        if ids != others:
            return f"its tokenizer encodes {text!r} as {others}, ours as {ids}"
    return None


@torch.no_grad()
def compare_logits(model: AlbertForPretraining | AlbertForTask, exported: Path) -> dict[str, float]:
    """By name how much logits differ: as a share of their size, or of 1 where they are smaller."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(exported).architectures[0]
    hf_model = getattr(transformers, kind).from_pretrained(
        exported, dtype=torch.float64, local_files_only=True
    )
    config = model.config
    draw = torch.Generator().manual_seed(0)
    positions = torch.linspace(0, config.max_position_embeddings - 1, 60).long()  # all over
    batch = {
        # Never <pad>, which transformers would leave out. Four rows: the options of one question.
        "input_ids": torch.randint(1, config.vocab_size, (4, 60), generator=draw),
        "token_type_ids": (torch.arange(60) // 31 % config.type_vocab_size).expand(4, -1),
        "position_ids": positions.expand(4, -1),
    }
    ends = torch.arange(0, 241, 60, dtype=torch.int32)
    rows = {name: x.flatten() for name, x in batch.items()}
    encoded = model.albert(**rows, cu_seqlens=ends, max_seqlen=60)
    if isinstance(model, AlbertForTask):
        logits = list(model.head(encoded, ends, 60).values())
        if kind == "AlbertForMultipleChoice":
            batch = {name: x.unsqueeze(0) for name, x in batch.items()}
    else:
        word = model.albert.embeddings.word.weight
        logits = [model.mlm_head.logits(encoded["last_hidden_state"], word)]
        logits += [] if model.pair_head is None else [model.pair_head(encoded["pooled"])]
    outputs = hf_model.eval()(**batch).items()
    hf_logits = {name: x for name, x in outputs if name.endswith("logits")}
    shares = {}
    for x, (name, other) in zip(logits, hf_logits.items(), strict=True):
        size = x.square().mean().sqrt().clamp_min(1)
        shares[name] = ((other.reshape(x.shape) - x).square().mean().sqrt() / size).item()
    return shares
