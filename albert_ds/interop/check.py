"""Whether Hugging Face's ALBERT computes what ours does: token ids, and logits of one batch.

Both models run in float64, so that rounding stays far below the tolerance at every size and a
difference means another function or other weights.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import ModelConfig
from albert_ds.model.hugging_face import Weights
from albert_ds.model.task_heads import AlbertForTask, HeadConfig
from albert_ds.vocab.vocab import SPECIAL_PIECES, Vocab

ROWS, LENGTH = 4, 60  # of the batch; the rows can be the options of one question
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

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        problem = compare_tokenizers(folder.vocab, exported)
        for name, (ours, theirs) in run_both(exported, config, folder.head, state).items():
            difference = (ours - theirs).abs().max().item()
            if not difference <= TOLERANCE:  # or no number
                problem = problem or f"its {name} differ from ours by {difference:.1e}"
    except (ValueError, RuntimeError) as error:  # what it makes of a file that cannot be read
        text = " ".join(str(error).split())[:200]
        problem = f"transformers {transformers.__version__} cannot read it: {text}"
    if problem:
        raise UserError(f"--checkpoint {folder.path}: not exported: {problem}")
    return (
        f"Checked at export: transformers {transformers.__version__} computes the same logits "
        f"within {TOLERANCE:.0e} (random ids, float64) and the same token ids."
    )


def check_rounded(exported: Path, folder: ModelFolder, config: ModelConfig, state: Weights) -> str:
    """Compare what was written to `exported` in bf16 with our fp32 model; the card's sentence.

    Raises UserError if the root mean square of a logit's difference is over ROUNDED of the
    logits' own, or of 1 where they are smaller.
    """
    if find_spec("transformers") is None:
        return " Its weights are rounded to bf16; what that changes was not checked."
    shares = {}
    for name, (logits, rounded) in run_both(exported, config, folder.head, state).items():
        if name.endswith("logits"):
            size = max(logits.square().mean().sqrt().item(), 1.0)
            shares[name] = (rounded - logits).square().mean().sqrt().item() / size
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


def run_both(
    folder: Path, config: ModelConfig, head: HeadConfig | None, state: Weights
) -> dict[str, tuple[Tensor, Tensor]]:
    """Hidden states and logits by name, in the order of computation: ours, those of transformers.

    Raises ValueError if transformers finds other tensors in `folder` than it needs.
    """
    import transformers

    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    theirs, loading = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, local_files_only=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := loading[problem]:
            what = problem.replace("_", " ")
            raise ValueError(f"{kind} loads it with {what}: {sorted(names)[0]}")
    ours = AlbertForPretraining(config) if head is None else AlbertForTask(config, head)
    ours.load_state_dict(state)
    length = min(LENGTH, config.max_position_embeddings)
    segments = torch.arange(length) // (length // 2 + 1) % config.type_vocab_size
    positions = torch.linspace(0, config.max_position_embeddings - 1, length).long()  # all over
    generator = torch.Generator().manual_seed(0)
    batch = {
        # Never <pad>, which transformers would leave out.
        "input_ids": torch.randint(1, config.vocab_size, (ROWS, length), generator=generator),
        "token_type_ids": segments.expand(ROWS, -1),
        "position_ids": positions.expand(ROWS, -1),
    }
    rows = {name: x.flatten() for name, x in batch.items()}
    ends = torch.arange(0, ROWS * length + 1, length, dtype=torch.int32)
    if head is not None and head.row.choices > 1:
        batch = {name: x.unsqueeze(0) for name, x in batch.items()}
    with torch.no_grad():
        encoded = ours.double().eval().albert(**rows, cu_seqlens=ends, max_seqlen=length)
        found = theirs.eval()(**batch, output_hidden_states=True)
        if isinstance(ours, AlbertForTask):
            logits = list(ours.head(encoded, ends, length).values())
        else:
            word = ours.albert.embeddings.word.weight
            logits = [ours.mlm_head.logits(encoded["last_hidden_state"], word)]
            logits += [] if ours.pair_head is None else [ours.pair_head(encoded["pooled"])]
    layers = [
        f"hidden states after layer {n + 1} of {config.num_layers}"
        for n in range(config.num_layers)
    ]
    names = ["embeddings", *layers, *(name for name in found if name.endswith("logits"))]
    pairs = zip(
        [*encoded["hidden_states"], *logits],
        [*found.hidden_states, *(x for name, x in found.items() if name.endswith("logits"))],
        strict=True,
    )
    both = [(x.double(), y.reshape(x.shape).double()) for x, y in pairs]
    return dict(zip(names, both, strict=True))
