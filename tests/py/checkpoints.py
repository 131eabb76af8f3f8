"""Makes small checkpoint folders for the tests, with a safetensors writer of its own."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tinyloop_py import format as fmt
from tinyloop_py.convert import CheckpointError, convert

DATA = Path(__file__).resolve().parents[1] / "data"

LLAMA = {
    "model_type": "llama",
    "vocab_size": 7,
    "hidden_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}

REFDESK = {
    "architectures": ["TinyloopRefdeskForCausalLM"],
    "model_type": "tinyloop_refdesk",
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "num_prelude_layers": 1,
    "num_core_layers": 3,
    "num_coda_layers": 1,
    "default_loops": 8,
    "injection": "add",
    "state_init": "zero",
    "norm_each_loop": True,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 4,
    "pad_token_id": 0,
    "system_token_id": 1,
    "user_token_id": 2,
    "assistant_token_id": 3,
    "loops_max_trained": 12,
}

_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I8": "i1"}


def small_refdesk(prelude=1, core=2, coda=1):
    sizes = {key: LLAMA[key] for key in LLAMA.keys() & REFDESK.keys() if key != "model_type"}
    return (
        REFDESK
        | sizes
        | {
            "tie_word_embeddings": True,
            "num_prelude_layers": prelude,
            "num_core_layers": core,
            "num_coda_layers": coda,
        }
    )


def tensor_shapes(config):
    """Names and shapes as such a checkpoint has them, from its config.json."""
    hidden, ff = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if config["model_type"] == "llama":
        layers = [f"layers.{n}" for n in range(config["num_hidden_layers"])]
    else:
        layers = [
            f"{part}.{n}"
            for part in ("prelude", "core", "coda")
            for n in range(config[f"num_{part}_layers"])
        ]
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if config["model_type"] != "llama":
        shapes["model.loop_norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in layers:
        shapes |= {
            f"model.{layer}.input_layernorm.weight": (hidden,),
            f"model.{layer}.post_attention_layernorm.weight": (hidden,),
            f"model.{layer}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"model.{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"model.{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"model.{layer}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"model.{layer}.mlp.gate_proj.weight": (ff, hidden),
            f"model.{layer}.mlp.up_proj.weight": (ff, hidden),
            f"model.{layer}.mlp.down_proj.weight": (hidden, ff),
        }
    return shapes


def random_tensors(config, dtype="F32", seed=0):
    """Name -> (safetensors dtype, array); bfloat16 as the upper halves of float32."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape).astype("<f4")
        if dtype == "BF16":
            values = (values.view("<u4") >> 16).astype("<u2")
        tensors[name] = (dtype, values.astype(_NUMPY[dtype], copy=False))
    return tensors


def save_safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_checkpoint(folder, config, tensors, **files):
    """A folder with config.json, model.safetensors, and other files by name (text or bytes)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_safetensors(folder / "model.safetensors", tensors)
    for name, content in files.items():
        if isinstance(content, dict):
            content = json.dumps(content)
        data = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def golden_checkpoint(family):
    """Config and tensors of a folder of tests/data that has one float32 file."""
    config = json.loads((DATA / family / "config.json").read_text())
    arrays = load_file(DATA / family / "model.safetensors")
    return config, {name: ("F32", array) for name, array in arrays.items()}


def convert_small(tmp_path, config, tensors=None, dtype=None, quantize=None, **files):
    """Converts a small checkpoint and gives the report and the file."""
    tensors = random_tensors(config) if tensors is None else tensors
    folder = save_checkpoint(tmp_path / "checkpoint", config, tensors, **files)
    report = convert(folder, tmp_path / "out.tinyloop", dtype=dtype, quantize=quantize)
    return report, fmt.read_file(tmp_path / "out.tinyloop")


def refused(tmp_path, message, config=LLAMA, tensors=None, **files):
    """Asserts that nothing is written and that the error says `message`."""
    with pytest.raises(CheckpointError) as caught:
        convert_small(tmp_path / "refused", config, tensors, **files)
    assert message in str(caught.value)
    assert not (tmp_path / "refused/out.tinyloop").exists()


def end_ids(file):
    return [value for (value,) in struct.iter_unpack("<i", file.blobs["end_ids"])]


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}
