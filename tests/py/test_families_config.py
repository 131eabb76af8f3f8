"""Families: what becomes of config.json: the file's config fields, and the special ids."""

import math

import numpy as np
import pytest
from checkpoints import DATA, convert_small, end_ids, golden_checkpoint

import tinyloop_py as tl
from tinyloop_py import cli
from tinyloop_py import format as fmt
from tinyloop_py.convert import convert

SIZES = {"hidden_size": 64, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "rotary_dim": 16}
QK_NORM = ("qk_norm", "qk_norm_after_rope", "qk_norm_weightless")
NOISE = {"state_init": 3, "init_std": math.sqrt(2 / 5) / 8, "init_cut": 3.0}
RETROFIT = (
    SIZES
    | NOISE
    | {
        "max_positions": 2048,
        "loops_max_trained": 32,
        "init_scale": 1.0,
        "inject": 2,
        "inject_source": 1,
    }
)


def staged(*parts):
    """Fields of stages (first layer, layers, looped, end norm)."""
    fields = {"n_stages": len(parts)}
    for s, part in enumerate(parts):
        names = ("first_layer", "n_layers", "looped", "end_norm")
        fields |= {f"stage{s}_{name}": value for name, value in zip(names, part, strict=True)}
    return fields


CONFIGS = {
    "hrm_text": SIZES
    | staged((0, 2, 1, 2), (2, 2, 1, 2))
    | {
        "vocab_size": 256,
        "ff_size": 112,
        "max_positions": 4096,
        "bos_id": 6,
        "pad_id": 5,
        "norm_eps": 1e-6,
        "norm_weightless": 1,
        "attn_out_gate": 1,
        "rope_theta": 1e4,
        "embed_scale": 25.0,
        "mask": 1,
        "final_norm": 0,
        "schedule": 1,
        "cycles_high": 2,
        "cycles_low": 3,
        "state_init": 4,
        "inject": 1,
        "inject_source": 2,
    },
    "huginn": SIZES
    | NOISE
    | staged((0, 2, 0, 0), (2, 3, 1, 0), (5, 1, 0, 0))
    | {
        "vocab_size": 256,
        "ff_size": 96,
        "max_positions": 128,
        "norm_placement": 2,
        "norm_eps": 1e-6,
        "q_bias": 1,
        "k_bias": 1,
        "rope_style": 1,
        "rope_theta": 5e4,
        "embed_scale": 8.0,
        "tied_head": 1,
        "loops_default": 32,
        "loops_max_trained": 64,
        "init_scale": 8.0,
        "inject": 2,
        "inject_source": 1,
        "norm_after_last": 1,
    },
    "iquest_loop": SIZES
    | staged((0, 3, 1, 0))
    | {
        "n_kv_heads": 2,
        "vocab_size": 288,
        "ff_size": 136,
        "max_positions": 131072,
        "bos_id": 1,
        "norm_eps": 1e-5,
        "rope_theta": 5e5,
        "loops_default": 2,
        "loops_min": 2,
        "loops_max": 2,
        "loops_max_trained": 2,
        "loop_attention": 1,
        "loop_window": 8,
    },
    "nanbeige": SIZES
    | staged((0, 3, 1, 1))
    | {
        "n_heads": 6,
        "n_kv_heads": 2,
        "vocab_size": 288,
        "ff_size": 136,
        "max_positions": 262144,
        "bos_id": 1,
        "pad_id": 0,
        "norm_eps": 1e-5,
        "rope_theta": 7e7,
        "final_norm": 0,
        "loops_default": 2,
        "loops_max_trained": 2,
    },
    "nanbeige_skipnorm": SIZES
    | staged((0, 2, 1, 0))
    | {
        "n_heads": 6,
        "n_kv_heads": 2,
        "vocab_size": 256,
        "ff_size": 112,
        "max_positions": 262144,
        "bos_id": 1,
        "pad_id": 0,
        "norm_eps": 1e-5,
        "rope_theta": 7e7,
        "final_norm": 1,
        "loops_default": 2,
        "loops_max_trained": 2,
    },
    "ouro": SIZES
    | staged((0, 3, 1, 1))
    | {
        "vocab_size": 320,
        "ff_size": 160,
        "max_positions": 65536,
        "bos_id": 0,
        "pad_id": 0,
        "norm_placement": 1,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "final_norm": 0,
        "loops_default": 4,
        "loops_max_trained": 4,
        "exit_mode": 1,
        "exit_threshold": 1.0,
    },
    "parcae": SIZES
    | NOISE
    | staged((0, 2, 0, 0), (2, 2, 1, 0), (4, 2, 0, 0))
    | {
        "vocab_size": 256,
        "ff_size": 160,
        "max_positions": 128,
        "norm_eps": 1e-5,
        "qk_norm": 1,
        "qk_norm_after_rope": 1,
        "qk_norm_weightless": 1,
        "qk_norm_eps": 2.0**-23,
        "value_embed": 1,
        "value_embed_channels": 32,
        "mlp_kind": 1,
        "activation": 3,
        "activation_scale": 0.5,
        "rope_style": 1,
        "rope_theta": 5e4,
        "tied_head": 1,
        "loops_default": 8,
        "init_scale": 1.0,
        "inject": 3,
        "inject_source": 1,
        "prelude_norm": 1,
        "state_out_proj": 1,
    },
    "qwen2": SIZES
    | staged((0, 3, 0, 0))
    | {
        "n_kv_heads": 2,
        "vocab_size": 272,
        "ff_size": 144,
        "max_positions": 32768,
        "bos_id": 1,
        "norm_eps": 1e-6,
        "q_bias": 1,
        "k_bias": 1,
        "v_bias": 1,
        "rope_theta": 1e6,
        "tied_head": 1,
    },
    "qwen3": SIZES
    | staged((0, 3, 0, 0))
    | {
        "n_kv_heads": 2,
        "head_dim": 32,
        "rotary_dim": 32,
        "vocab_size": 272,
        "ff_size": 144,
        "max_positions": 40960,
        "bos_id": 1,
        "norm_eps": 1e-6,
        "qk_norm": 1,
        "qk_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tied_head": 1,
    },
    "recurrent_llama": RETROFIT
    | staged((0, 2, 0, 0), (2, 2, 1, 0), (4, 1, 0, 0))
    | {
        "n_kv_heads": 2,
        "vocab_size": 300,
        "ff_size": 128,
        "norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": 2,
        "rope_factor": 32.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_positions": 64,
        "loops_default": 8,
    },
    "recurrent_olmo": RETROFIT
    | staged((0, 1, 0, 0), (1, 2, 1, 0), (3, 1, 0, 0))
    | {
        "vocab_size": 256,
        "ff_size": 128,
        "norm_placement": 3,
        "norm_eps": 1e-6,
        "qk_norm": 2,
        "qk_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "loops_default": 8,
    },
    "recurrent_tinyllama": RETROFIT
    | staged((0, 1, 0, 0), (1, 2, 1, 0), (3, 1, 0, 0))
    | {
        "n_heads": 8,
        "n_kv_heads": 1,
        "head_dim": 8,
        "rotary_dim": 8,
        "vocab_size": 256,
        "ff_size": 112,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "loops_default": 4,
    },
}


@pytest.mark.parametrize("family", CONFIGS)
def test_config_fields(tmp_path, family):
    report = convert(DATA / family, tmp_path / "out.tinyloop")
    got = fmt.read_file(report.path).config
    wanted = fmt.Config(**CONFIGS[family])
    assert got.init_std == pytest.approx(wanted.init_std, rel=1e-15)
    differing = {k: v for k, v in got.values().items() if v != wanted.values()[k]}
    assert differing.keys() <= {"init_std"}


CHANGED_CONFIGS = [
    ("ouro", {"early_exit_threshold": 0.7}, {"exit_threshold": 0.7}),
    ("ouro", {"early_exit_threshold": None}, {"exit_threshold": 1.0}),
    ("ouro", {"early_exit_step": None}, {}),
    ("ouro", {"total_ut_steps": 6}, {"loops_default": 6, "loops_max_trained": 6}),
    ("ouro", {"sliding_window": 4096}, {}),
    ("ouro", {"sliding_window": 65536, "use_sliding_window": True}, {}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": None}, {}),
    ("qwen2", {"attention_bias": False}, {"q_bias": 1}),
    ("nanbeige", {"num_loops": 3}, {"loops_default": 3, "loops_max_trained": 3}),
    ("nanbeige", {"loop_loss_weights": [0.5, 0.5, 1]}, {"loops_default": 4}),
    ("nanbeige", {"loop_loss_weights": None, "enable_mhc": False}, {"loops_default": 2}),
    ("nanbeige", {"emb_neighbor_num": 0, "loop_middle_layers": []}, {}),
    ("nanbeige", {"kv_channels": None}, {}),
    ("iquest_loop", {"loop_window_size": 64}, {"loop_window": 64}),
    ("huginn", {"num_attention_heads": 4, "n_heads": None}, {"n_heads": 4}),
    ("huginn", {"block_class_name": "TransformerPreNormBlock"}, {"norm_placement": 2}),
    ("huginn", {"init_values": {"std": 0.25, "embed_scale": 3.0}}, {"init_std": 0.25}),
    ("huginn", {"init_values": {"std": 0.25, "embed_scale": 3.0}}, {"embed_scale": 8.0}),
    ("huginn", {"init_values": None}, {"init_std": math.sqrt(2 / (5 * 64))}),
    ("huginn", {"rope_theta": 50000.0, "tie_word_embeddings": True}, {"rope_theta": 5e4}),
    ("huginn", {"head_dim": None, "num_key_value_heads": None}, {"head_dim": 16}),
    ("huginn", {"bos_token_id": 250, "pad_token_id": 251}, {"bos_id": 250, "pad_id": 251}),
    ("recurrent_llama", {"block_class_name": "Sandwich"}, {"norm_placement": 0}),
    (
        "recurrent_llama",
        {"init_values": {"embed_scale": 2.5, "std": 0.5}},
        {"embed_scale": 2.5, "init_scale": 2.5, "init_std": 0.5},
    ),
    ("recurrent_llama", {"rope_base": 7.0}, {"rope_theta": 5e5}),
    (
        "recurrent_olmo",
        {"rope_theta": None, "rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}},
        {"rope_theta": 3e5},
    ),
    ("recurrent_olmo", {"initial_state_mode": None}, {"state_init": 3}),
    ("hrm_text", {"num_hidden_layers": 99, "num_layers_per_stack": 2}, {"stage1_n_layers": 2}),
    ("hrm_text", {"num_hidden_layers": 4}, {"stage1_n_layers": 2}),
    ("hrm_text", {"num_hidden_layers": 16, "prefix_lm": None}, {"mask": 1}),
    (
        "iquest_loop",
        {"rms_norm_eps": None, "rope_theta": None},
        {"norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    (
        "huginn",
        {"norm_eps": None, "tie_embeddings": None, "qk_bias": None},
        {"norm_eps": 1e-6, "tied_head": 1, "q_bias": 1},
    ),
    (
        "huginn",
        {"mean_recurrence": None, "rope_parameters": {"rope_type": "default"}},
        {"loops_default": 32},
    ),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, {}),
    ("hrm_text", {"prefix_lm": False, "H_cycles": 5}, {"mask": 0, "cycles_high": 5}),
    ("hrm_text", {"embedding_scale": None, "initializer_range": 0.02}, {"embed_scale": 50.0}),
    ("parcae", {"recurrent_num_attention_heads": 4, "norm_eps": 1e-6}, {"norm_eps": 1e-6}),
    ("parcae", {"num_attention_heads": None, "n_heads": 4}, {"n_heads": 4}),
    ("parcae", {"qk_norm": False}, dict.fromkeys((*QK_NORM, "qk_norm_eps"), 0)),
    ("parcae", {"rope_settings": {"rope_base": 7}}, {"rope_theta": 7.0}),
    ("llama", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, {}),
]


@pytest.mark.parametrize(("family", "keys", "fields"), CHANGED_CONFIGS)
def test_keys_that_say_something(tmp_path, family, keys, fields):
    config, tensors = golden_checkpoint(family)
    report, file = convert_small(tmp_path, config | keys, tensors)
    wanted = fmt.Config(**CONFIGS[family] | fields) if family in CONFIGS else file.config
    changed = {k: v for k, v in file.config.values().items() if v != wanted.values()[k]}
    assert changed.keys() <= {"init_std", "loops_max_trained"} - fields.keys()
    assert {name: getattr(file.config, name) for name in fields} == fields
    assert report.unknown_keys == []
    tl.Model(file.path, 16, threads=1).close()  # what is written can be run


def test_a_mistral_is_a_llama_whose_window_shows_everything(tmp_path):
    config, tensors = golden_checkpoint("llama")
    _, plain = convert_small(tmp_path, config, tensors)
    written = plain.path.read_bytes()
    for window in (None, 2048, 4096):
        keys = {"model_type": "mistral", "sliding_window": window}
        report, file = convert_small(tmp_path, config | keys, tensors)
        assert (report.family, file.path.read_bytes()) == ("mistral", written)


@pytest.mark.parametrize(("model_type", "parts"), [("llama", "qkvo"), ("qwen3", "qkvo")])
def test_biases_of_attention_and_mlp(tmp_path, model_type, parts):
    config, tensors = golden_checkpoint("llama" if model_type == "llama" else "qwen3")
    rng = np.random.default_rng(3)
    config["attention_bias"] = True
    names = [f"self_attn.{part}_proj" for part in parts]
    if model_type == "llama":
        config["mlp_bias"] = True
        names += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    for n in range(config["num_hidden_layers"]):
        for name in names:
            rows_of = tensors[f"model.layers.{n}.{name}.weight"][1].shape[0]
            bias = rng.standard_normal(rows_of).astype("<f4")
            tensors[f"model.layers.{n}.{name}.bias"] = ("F32", bias)
    _, file = convert_small(tmp_path, config, tensors)
    assert [getattr(file.config, f"{part}_bias") for part in "qkvo"] == [1, 1, 1, 1]
    assert file.config.mlp_bias == (model_type == "llama")
    for own, its in (("attn.o", "self_attn.o_proj"), ("attn.k", "self_attn.k_proj")):
        got = file.array(f"layers.1.{own}.bias")
        assert np.array_equal(got, tensors[f"model.layers.1.{its}.bias"][1])
    if model_type == "llama":
        got = file.array("layers.2.mlp.down.bias")
        assert np.array_equal(got, tensors["model.layers.2.mlp.down_proj.bias"][1])


def test_nested_unknown_keys_are_reported(tmp_path):
    config, tensors = golden_checkpoint("huginn")
    config["init_values"] |= {"gain": 3}
    report, _ = convert_small(tmp_path, config | {"zeta": 1}, tensors)
    assert report.unknown_keys == ["init_values.gain", "zeta"]


# ---- Special ids ----------------------------------------------------------------------------


def real_ouro(tmp_path, **keys):
    """Ouro with a vocabulary of its size, as narrow as can be."""
    config, tensors = golden_checkpoint("ouro")
    wide = {"vocab_size": 49152, "hidden_size": 2, "head_dim": 2, "num_attention_heads": 1}
    config |= wide | {"num_key_value_heads": 1, "intermediate_size": 1} | keys
    new = {64: 2, 320: 49152, 160: 1}
    tensors = {
        name: ("F32", np.ones([new.get(size, size) for size in array.shape], "<f4"))
        for name, (_, array) in tensors.items()
    }
    return convert_small(tmp_path, config, tensors, generation_config__json={"eos_token_id": 0})


def test_wrong_special_ids_of_ouro_are_put_right_and_told(tmp_path):
    report, file = real_ouro(tmp_path)
    assert (file.config.bos_id, end_ids(file), file.config.pad_id) == (1, [2], 0)
    assert len(report.notes) == 1
    assert "bos 1, eos 2 and pad 0, which were used" in report.notes[0]


def test_other_special_ids_of_ouro_are_kept(tmp_path):
    report, file = real_ouro(tmp_path, bos_token_id=1, eos_token_id=2)
    assert (file.config.bos_id, end_ids(file), file.config.pad_id) == (1, [2, 0], 0)
    assert report.notes == []


def test_several_end_ids_of_ouro(tmp_path):
    report, file = real_ouro(tmp_path, eos_token_id=[2, 7])
    assert (file.config.bos_id, end_ids(file), file.config.pad_id) == (0, [2, 7, 0], 0)
    assert report.notes == []


def test_special_ids_with_another_vocabulary_are_kept_and_told(tmp_path, capsys):
    assert cli.main(["convert", str(DATA / "ouro"), str(tmp_path / "out.tinyloop")]) == 0
    file = fmt.read_file(tmp_path / "out.tinyloop")
    assert (file.config.bos_id, end_ids(file), file.config.pad_id) == (0, [0], 0)
    warning = capsys.readouterr().err
    assert warning.startswith("tinyloop: warning: config.json: bos and eos ids are both 0")
    assert "They were kept" in warning


def test_padded_vocabulary_is_kept(tmp_path):
    config, tensors = golden_checkpoint("huginn")
    _, file = convert_small(tmp_path, config | {"vocab_size": 250}, tensors)
    assert file.config.vocab_size == 256
