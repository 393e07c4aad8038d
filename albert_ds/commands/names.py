"""What a user may type after `albert-ds`."""

# Heading: command: its module, whose `main` takes the words that follow, and what it does.
COMMANDS = {
    "text": {
        "vocab": ("albert_ds.commands.vocab", "train a vocabulary on text"),
        "shards": ("albert_ds.commands.shards", "split, encode and pack text for training"),
        "inspect": ("albert_ds.commands.inspect", "look at shards before training on them"),
    },
    "training": {
        "train": ("albert_ds.train", "pretrain ALBERT, or a BERT baseline"),
        "finetune": ("albert_ds.finetune", "fine-tune on GLUE, SQuAD, RACE or labels of your own"),
        "learn": ("albert_lab.commands.learn", "from text to a small model in the hours given"),
        "recipes": ("albert_ds.commands.recipes", "write DeepSpeed's JSONs and recipes for Slurm"),
        "path": ("albert_ds.commands.path", "where a trainer lies, for launchers"),
        "completion": ("albert_ds.commands.completion", "make a shell complete flags"),
    },
    "models": {
        "probe": ("albert_ds.commands.probe", "held-out accuracies of a checkpoint"),
        "fill-mask": ("albert_ds.commands.fill_mask", "fill the masks of a sentence"),
        "ensemble": ("albert_ds.commands.ensemble", "average several fine-tuned models"),
        "export": ("albert_ds.commands.export", "write a checkpoint for Hugging Face"),
        "import": ("albert_ds.commands.export", "read a folder of Hugging Face"),
    },
    "measuring": {
        "report": ("albert_lab.commands.report", "make one page of what runs did"),
        "plan": ("albert_lab.commands.scaling_model", "layout, memory and hours on a cluster"),
        "scaling": (
            "albert_lab.commands.scaling_model",
            "predict steps of several models on clusters",
        ),
        "bench": ("albert_lab.commands.throughput_bench", "measure training steps of models"),
        "traffic": ("albert_lab.commands.comm_volume", "count the bytes that a step sends"),
        "gpu-check": ("albert_lab.commands.gpu_check", "check a machine with GPUs"),
        "plots": ("albert_lab.commands.plots", "draw runs and measurements"),
    },
}
# Their module holds several commands, and its parser expects this word first.
OWN_WORD = {"export", "import", "plan"}
