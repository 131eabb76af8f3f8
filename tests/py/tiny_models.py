"""Looped models of some kilobytes, of odd sizes, that run tens of thousands of tokens a second."""

import numpy as np
from checkpoints import save_checkpoint, small_refdesk, tensor_shapes

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


def scaled_tensors(config, seed):
    """Random weights of about unit gain, so that the logits of a small model say something."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 1.0 if len(shape) == 1 else 1.5 / np.sqrt(shape[1])
        offset = 1.0 if len(shape) == 1 else 0.0
        values = offset + scale * rng.standard_normal(shape) * (0.1 if len(shape) == 1 else 1.0)
        tensors[name] = ("F32", values.astype(np.float32))
    return tensors


def make(folder, seed, **changes):
    """Writes a model with random weights and returns its path. Seed 7 is conftest's tiny model."""
    config = small_refdesk(prelude=1, core=2, coda=1) | SIZES | changes
    save_checkpoint(folder / "checkpoint", config, scaled_tensors(config, seed))
    convert(folder / "checkpoint", folder / "model.tinyloop")
    return folder / "model.tinyloop"
