"""Reading the stream in tests, and taking its micro-batches apart again."""

from collections.abc import Iterator

from albert_ds.data.micro_batch import MicroBatch
from albert_ds.data.shards import Sequence, Shard, ShardSet
from albert_ds.data.stream import training_batches
from albert_ds.data.stream_config import DataPlan, StreamConfig
from tests.data.corpus import SEQUENCE_LENGTH

CONFIG = StreamConfig(sequence_length=SEQUENCE_LENGTH, seed=3)
BATCH = 8


def stream(sources, config=CONFIG, *, weights=None, start=0, rank=0, ranks=1, workers=0, micro=2):
    plan = DataPlan(batch_size=BATCH, stream=config)
    return training_batches(
        sources,
        weights,
        plan,
        step=start // BATCH,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=ranks,
        num_workers=workers,
    )


def samples_of(batches):
    """{position: everything that was drawn for it}, from micro-batches of any kind."""
    samples = {}
    for batch in batches:
        t = batch.tensors
        bounds = batch.tensors["cu_seqlens"].tolist()
        for i, position in enumerate(batch.sample_ids):
            begin, end = bounds[i : i + 2]
            masked = (t["masked_positions"] >= begin) & (t["masked_positions"] < end)
            assert position not in samples
            samples[position] = (
                t["input_ids"][begin:end].tolist(),
                t["token_type_ids"][begin:end].tolist(),
                t["position_ids"][begin:end].tolist(),
                (t["masked_positions"][masked] - begin).tolist(),
                t["masked_labels"][masked].tolist(),
                t["pair_labels"][i].item(),
            )
    return samples


def take(batches: Iterator[MicroBatch], samples: int) -> Iterator[MicroBatch]:
    """The micro-batches that hold the next `samples` samples."""
    while samples > 0:
        batch = next(batches)
        samples -= batch.samples
        yield batch


def restore(sample):
    """The ids of a sample before masking."""
    ids = list(sample[0])
    for position, label in zip(sample[3], sample[4], strict=True):
        ids[position] = label
    return ids


def stored_sequences(source: ShardSet) -> list[Sequence]:
    """All of a split, in the order of its shards."""
    shards = [Shard(source, number) for number in range(len(source.shards))]
    return [shard[i] for shard in shards for i in range(len(shard))]
