"""The models of the benchmark: the one that ships with the package, and two made here.

`d512` has random weights, in two files that hold the same ones: a `.tinyloop` file, and a GGUF file
of llama.cpp's looped architecture `nanbeige`. That one puts its final norm between the loops too;
the other has a stage norm after every loop and the final norm once more. All norm weights are 1, so
the second norm in a row changes nothing and both files give the same logits.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

import tinyloop_py as tl
from tinyloop_py.config import stage_fields
from tinyloop_py.format import Config, Stage, TensorSpec, read_file, tensor_shapes, write_file
from tinyloop_py.rounding import convert_dtype

# Name of each tensor of a layer in GGUF files.
GGUF_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


class BenchModel(NamedTuple):
    """A model under test. `weights`: matrices as bfloat16 bits (uint16), norms as float32."""

    name: str
    path: Path
    config: Config
    weights: dict[str, np.ndarray]
    gguf: Path | None


def refdesk() -> BenchModel:
    """The model that ships with the package; llama.cpp has no architecture for it."""
    file = read_file(tl.default_model_path())
    weights = {name: file.array(name) for name in file.tensors}
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 1:
            weights[name] = convert_dtype(weights[name], tensor.dtype, "float32")
    return BenchModel("refdesk", file.path, file.config, weights, None)


def d512(folder: Path) -> BenchModel:
    """Writes the looped model of width 512 with 4 layers x 8 loops into the folder.

    There is no GGUF file (None) where the `gguf` package is not installed.
    """
    config = Config(
        vocab_size=8192,
        hidden_size=512,
        n_heads=8,
        n_kv_heads=8,
        head_dim=64,
        ff_size=1408,
        max_positions=2048,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rotary_dim=64,
        tied_head=1,
        loops_default=8,
        **stage_fields([Stage(0, 4, 1, 1)]),
    )
    weights = random_weights(config)
    path = folder / "d512.tinyloop"
    write_tinyloop(path, config, weights)
    try:
        gguf = folder / "d512.gguf"
        write_gguf(gguf, config, weights)
    except ImportError:
        gguf = None
    return BenchModel("d512", path, config, weights, gguf)


def tiny(path: Path) -> None:
    """Writes a model so small that its prefixes cost next to nothing: 12 bytes of KV a token."""
    config = Config(
        vocab_size=8192,
        hidden_size=2,
        n_heads=1,
        n_kv_heads=1,
        head_dim=2,
        ff_size=1,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rotary_dim=2,
        tied_head=1,
        **stage_fields([Stage(0, 1, 0, 0)]),
    )
    write_tinyloop(path, config, random_weights(config))


def random_weights(config: Config) -> dict[str, np.ndarray]:
    """Normal weights of deviation 0.02, and norms of 1."""
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
        else:
            values = random.standard_normal(shape, np.float32) * np.float32(0.02)
            weights[name] = convert_dtype(values, "float32", "bfloat16")
    return weights


def write_tinyloop(path: Path, config: Config, weights: dict[str, np.ndarray]) -> None:
    """Writes the weights as a `.tinyloop` file."""
    dtypes = {1: "float32", 2: "bfloat16"}
    specs = [TensorSpec(name, dtypes[array.ndim], array.shape) for name, array in weights.items()]
    write_file(path, config, specs, lambda spec: [weights[spec.name]], {})


def write_gguf(path: Path, config: Config, weights: dict[str, np.ndarray]) -> None:
    """Writes a model of one looped stage with a tied head; ImportError without `gguf`."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "nanbeige")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ff_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_uint32("nanbeige.num_loops", config.loops)
    writer.add_tokenizer_model("none")
    for name, gguf_name in gguf_names(config).items():
        array = weights[name]
        if name.endswith(("attn.q.weight", "attn.k.weight")):
            array = interleave_pairs(array, config.head_dim)
        if array.ndim == 1:
            writer.add_tensor(gguf_name, array)
        else:
            bits = np.ascontiguousarray(array).view(np.uint8)
            writer.add_tensor(gguf_name, bits, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_names(config: Config) -> dict[str, str]:
    """GGUF's name of every tensor but the stage's norm, which is the final norm there."""
    names = {"embed.weight": "token_embd.weight", "final_norm.weight": "output_norm.weight"}
    for n in range(config.n_layers):
        for ours, theirs in GGUF_LAYER_NAMES.items():
            names[f"layers.{n}.{ours}.weight"] = f"blk.{n}.{theirs}.weight"
    return names


def interleave_pairs(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders each head's rows from rotation pairs (i, i + head_dim / 2) to (2 i, 2 i + 1)."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return heads.swapaxes(1, 2).reshape(weight.shape)
