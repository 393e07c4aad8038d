"""Which head a fine-tuned model has; light enough for a command line to check."""

from dataclasses import dataclass

CHOICES = 4  # options of a question
NUM_TOP = 5  # starts, and ends of each, that the conditional head proposes (release: 5 x 5)
KINDS = ("classification", "regression", "choice", "span", "conditional_span")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """The head of a task."""

    kind: str  # one of KINDS
    num_labels: int  # outputs of its linear map
    dropout: float = 0.1  # before it; of the span head none
    labels: tuple[str, ...] = ()  # names of the classes

    def __post_init__(self):
        assert self.kind in KINDS, self.kind

    @property
    def reads_pooled(self) -> bool:
        """Whether it reads the pooled [CLS]; else it reads every token."""
        return self.kind in ("classification", "regression", "choice")
