"""From shards to micro-batches, drawn when they are read.

    positions of this rank -> micro-batches of positions -> (every W-th one to each worker) ->
    sequence from its shard -> pair of segments -> masked -> concatenated, as torch tensors

What a sample looks like is drawn from (seed, source, epoch, its number there) and from nothing
else. Shapes: B sequences, N tokens, P predicted positions of a micro-batch.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from albert_ds.data.masking import count_predictions, draw_positions, draw_replacements
from albert_ds.data.order import SAMPLE_DRAWS, Place, ShardOrder, SourceOrder, build_generator
from albert_ds.data.records import Sequence
from albert_ds.data.segments import NO_LABEL, OBJECTIVES, Sentences, draw_pair, draw_target
from albert_ds.data.shards import Shard, ShardSet
from albert_ds.data.vocab import CLS, MASK, SEP
from albert_ds.data.words import WORD_RULES, build_word_starts
from albert_ds.errors import ENDINGS, UserError

PARTNER_TRIES = 10  # draws of a sequence of another document, before they are all looked at
