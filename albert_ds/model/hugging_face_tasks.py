"""Fine-tuned models under Hugging Face's names: the encoder's table, and one row for each head.

The conditional head of SQuAD 2.0 has no counterpart there and is refused.
"""

from albert_ds.errors import UserError
from albert_ds.model.config import ModelConfig
from albert_ds.model.head_config import HeadConfig
from albert_ds.model.hugging_face import (
    ENCODER,
    Weights,
    build_hf_config,
    build_identity,
    name_pairs,
)

# Kind of head -> (their architecture, their name of our head's linear map).
ARCHITECTURES = {
    "classification": ("AlbertForSequenceClassification", "classifier"),
    "regression": ("AlbertForSequenceClassification", "classifier"),
    "choice": ("AlbertForMultipleChoice", "classifier"),
    "span": ("AlbertForQuestionAnswering", "qa_outputs"),
}


def task_to_hf(
    config: ModelConfig, head: HeadConfig, state: Weights, where: str
) -> tuple[dict, Weights]:
    """A fine-tuned model as Hugging Face's (config.json as a dict, state dict).

    Raises UserError, with `where`, for the head of SQuAD 2.0.
    """
    if head.kind not in ARCHITECTURES:
        raise UserError(
            f"{where}: its head scores the end of an answer given the start, and answerability by "
            "a classifier of its own (SQuAD 2.0); Hugging Face has no such ALBERT. Exported are "
            "pretrained models, GLUE, RACE and SQuAD 1.1"
        )
    architecture, name = ARCHITECTURES[head.kind]
    hf_config = build_hf_config(config, architecture) | {"classifier_dropout_prob": head.dropout}
    if head.kind == "classification":
        words = dict(enumerate(head.labels))
        hf_config["id2label"] = {str(number): word for number, word in words.items()}
        hf_config["label2id"] = {word: number for number, word in words.items()}
        hf_config["problem_type"] = "single_label_classification"
    elif head.kind == "regression":
        hf_config |= {"num_labels": 1, "problem_type": "regression"}
    pairs = [pair for pair in name_pairs(config) if pair[0].startswith(ENCODER)]
    pairs += [(f"head.score.{leaf}", f"{name}.{leaf}") for leaf in ("weight", "bias")]
    return hf_config, {theirs: state[ours] for ours, theirs in pairs} | build_identity(config)
