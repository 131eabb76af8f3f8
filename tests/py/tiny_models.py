"""Looped models of some kilobytes, of odd sizes, that run tens of thousands of tokens a second."""

from checkpoints import save_checkpoint, small_refdesk
from conftest import scaled_tensors

from tinyloop_py.convert import convert

SIZES = {
    "vocab_size": 53,
    "hidden_size": 22,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
    "default_loops": 3,
}


def make(folder, seed, **changes):
    """Writes a model with random weights and returns its path. Seed 7 is conftest's tiny model."""
    config = small_refdesk(prelude=1, core=2, coda=1) | SIZES | changes
    save_checkpoint(folder / "checkpoint", config, scaled_tensors(config, seed))
    convert(folder / "checkpoint", folder / "model.tinyloop")
    return folder / "model.tinyloop"
