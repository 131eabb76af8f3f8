"""What conversion takes from config.json, and the blobs: each supported form, every refusal."""

import math

import pytest
from checkpoints import (
    LLAMA,
    convert_small,
    end_ids,
    random_tensors,
    refused,
    small_refdesk,
)

import tinyloop_py as tl
from tinyloop_py.convert import CheckpointError, convert
from tinyloop_py.families import FAMILIES

# ---- config.json ----------------------------------------------------------------------------


def test_missing_keys_have_their_defaults(tmp_path):
    for absent in ({}, {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None}):
        config = {
            key: value
            for key, value in LLAMA.items()
            if key
            not in {
                "head_dim",
                "num_key_value_heads",
                "rms_norm_eps",
                "rope_theta",
                "max_position_embeddings",
                "tie_word_embeddings",
                "hidden_act",
                "eos_token_id",
                "bos_token_id",
            }
        } | {"hidden_size": 8, **absent}
        _, file = convert_small(tmp_path, config)
        read = file.config
        assert (read.head_dim, read.rotary_dim, read.n_kv_heads) == (2, 2, 4)
        assert (read.norm_eps, read.rope_theta, read.max_positions) == (1e-6, 10000.0, 0)
        assert (read.bos_id, read.pad_id, read.tied_head) == (-1, -1, 0)
        assert file.blobs == {}


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3 | {"factor": 32}}},
    ],
)
def test_llama3_rope_forms(tmp_path, keys):
    config = LLAMA | {"rope_theta": 5e5} | keys
    if "rope_theta" in keys.get("rope_parameters", {}):
        del config["rope_theta"]
    _, file = convert_small(tmp_path, config)
    read = file.config
    assert (read.rope_theta, read.rope_scaling, read.rope_factor) == (5e5, 2, 32.0)
    assert (read.rope_low_freq_factor, read.rope_high_freq_factor) == (1.0, 4.0)
    assert read.rope_original_positions == 64


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_theta": 10000}},
        {"partial_rotary_factor": 1.0},
    ],
)
def test_plain_rope_forms(tmp_path, keys):
    _, file = convert_small(tmp_path, LLAMA | keys)
    assert (file.config.rope_theta, file.config.rope_scaling) == (10000.0, 0)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_linear_rope(tmp_path, kind):
    _, file = convert_small(tmp_path, LLAMA | {"rope_scaling": {kind: "linear", "factor": 4}})
    assert (file.config.rope_scaling, file.config.rope_factor) == (1, 4.0)
    assert file.config.rope_original_positions == 0
    tl.Model(file.path, 16, threads=1).close()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("keys", "positions", "betas", "attention_factor"),
    [
        ({}, 32, (32.0, 1.0), 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 32, (32.0, 1.0), 1.25),
        ({"attention_factor": None, "mscale": None}, 32, (32.0, 1.0), 0.1 * math.log(4) + 1),
        ({"beta_fast": 16, "beta_slow": 2.5}, 32, (16.0, 2.5), 0.1 * math.log(4) + 1),
        ({"original_max_position_embeddings": None}, 64, (32.0, 1.0), 0.1 * math.log(4) + 1),
        ({"factor": 0.5}, 32, (32.0, 1.0), 1.0),
        ({"truncate": True}, 32, (32.0, 1.0), 0.1 * math.log(4) + 1),
        (
            {"mscale": 0.8, "mscale_all_dim": 2.0},
            32,
            (32.0, 1.0),
            (0.08 * math.log(4) + 1) / (0.2 * math.log(4) + 1),
        ),
        ({"mscale": 0.8}, 32, (32.0, 1.0), 0.1 * math.log(4) + 1),
        ({"mscale": 0.8, "mscale_all_dim": 0}, 32, (32.0, 1.0), 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_rope(tmp_path, keys, positions, betas, attention_factor):
    _, file = convert_small(tmp_path, LLAMA | {"rope_scaling": YARN | keys})
    read = file.config
    assert (read.rope_scaling, read.rope_factor) == (3, (YARN | keys)["factor"])
    assert read.rope_original_positions == positions
    assert (read.rope_beta_fast, read.rope_beta_slow) == betas
    assert read.rope_attention_factor == pytest.approx(attention_factor, rel=1e-15)
    tl.Model(file.path, 16, threads=1).close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**YARN, "truncate": False}, "truncate is False; supported: True"),
        ({**YARN, "beta_fast": 1.0}, "beta_fast is 1.0; beta_fast 1.0 must be above beta_slow 1.0"),
        ({**YARN, "beta_slow": 40}, "beta_slow is 40; beta_fast 32.0 must be above"),
        ({**YARN, "factor": None}, "has no factor"),
        ({**YARN, "attention_factor": 0}, "attention_factor is 0"),
        ({**YARN, "mscale": "1", "mscale_all_dim": 1}, "mscale is '1'"),
        ({**YARN, "original_max_position_embeddings": 2**31 + 1}, "at most 2147483648"),
        ({**YARN, "rope_theta": 1.0}, "rope_type is 'yarn'; it takes a rope_theta above 1"),
        ({"rope_type": "linear"}, "has no factor"),
        ({"type": "linear", "factor": -2.0}, "factor is -2.0"),
        ({"type": "dynamic", "factor": 2.0}, "supported: default, linear, llama3, yarn"),
        ({"rope_type": "longrope", "factor": 2.0}, "supported: default, linear, llama3, yarn"),
        ({"rope_type": "llama3", "type": "yarn", **LLAMA3}, "type is 'yarn'"),
        ({"rope_type": "llama3"}, "has no low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3 | {"factor": 0}}, "factor is 0"),
        ({"rope_type": "llama3", **LLAMA3 | {"high_freq_factor": 1}}, "high_freq_factor is 1"),
        (
            {"rope_type": "llama3", **LLAMA3 | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0",
        ),
        ({"rope_type": "llama3", **LLAMA3, "attention_factor": 2}, "attention_factor is 2"),
        ({"rope_type": "default", "factor": 2.0}, "factor is 2.0"),
        ({"rope_type": ["llama3"]}, "rope_type is ['llama3']"),
    ],
)
def test_other_rope_is_refused(tmp_path, keys, message):
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    refused(tmp_path, message, config | {"rope_scaling": keys})
    refused(tmp_path, message, config | {"rope_parameters": keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported: hrm_text, huginn_raven, iquest"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": 3}, "model_type is 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"attention_bias": True}, "tensors missing: model.layers.0.self_attn.q_proj.bias"),
        ({"attention_bias": 0}, "attention_bias is 0; it must be true or false"),
        ({"mlp_bias": True}, "tensors missing: model.layers.0.mlp.gate_proj.bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ["),
        ({"layer_types": "sliding"}, "layer_types is 'sliding'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"sliding_window": 32}, "sliding_window is 32"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; it must be an object"),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters is there too",
        ),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000.0"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be an integer from 1 to 16777216"),
        ({"vocab_size": 7.0}, "vocab_size is 7.0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": 2**17 + 1}, "hidden_size is 131073"),
        ({"intermediate_size": -5}, "intermediate_size is -5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide"),
        ({"head_dim": 3}, "head_dim is 3; it must be even"),
        ({"head_dim": 258}, "head_dim is 258"),
        ({"head_dim": None}, "no head_dim, and num_attention_heads 4 does not divide the width 6"),
        ({"head_dim": None, "hidden_size": 12}, "head_dim is 3; it must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": 10**400}, "it must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id is [2, 'x']"),
        ({"bos_token_id": [1]}, "bos_token_id is [1]"),
    ],
)
def test_unsupported_config_is_refused_by_key_and_value(tmp_path, keys, message):
    refused(tmp_path, message, LLAMA | keys, random_tensors(LLAMA))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"injection": "concat"}, "injection is 'concat'; supported: 'add'"),
        ({"state_init": "normal"}, "state_init is 'normal'; supported: 'zero'"),
        ({"norm_each_loop": "yes"}, "norm_each_loop is 'yes'"),
        ({"num_core_layers": 0}, "num_core_layers is 0"),
        ({"num_prelude_layers": -1}, "num_prelude_layers is -1"),
        ({"default_loops": 1025}, "default_loops is 1025"),
    ],
)
def test_unsupported_refdesk_config_is_refused(tmp_path, keys, message):
    refused(tmp_path, message, small_refdesk() | keys, random_tensors(small_refdesk()))


def test_other_keys_are_ignored_and_unknown_ones_reported(tmp_path):
    harmless = {"initializer_range": 0.02, "use_cache": True, "dtype": "float32"}
    unknown = {"zeta": 1, "alpha_scaling": None, "new_attention": {"kind": "linear"}}
    report, file = convert_small(tmp_path, LLAMA | harmless | unknown)
    written = file.path.read_bytes()
    assert report.unknown_keys == ["new_attention", "zeta"]
    _, plain = convert_small(tmp_path, LLAMA)
    assert plain.path.read_bytes() == written


def test_every_family_is_a_row():
    assert sorted(FAMILIES) == [
        "hrm_text",
        "huginn_raven",
        "iquestloopcoder",
        "llama",
        "mistral",
        "nanbeige",
        "ouro",
        "parcae",
        "qwen2",
        "qwen3",
        "tinyloop_refdesk",
    ]


# ---- Blobs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [
        (2, None, [2]),
        ([2, 4], None, [2, 4]),
        (None, None, None),
        ([], {"eos_token_id": None}, None),
        (2, {"eos_token_id": 2}, [2]),
        (2, {"eos_token_id": [5, 2, 3]}, [2, 5, 3]),
        (None, {"eos_token_id": 6}, [6]),
        (2, {"temperature": 0.6}, [2]),
    ],
)
def test_end_ids(tmp_path, own, generation, ids):
    files = {} if generation is None else {"generation_config__json": generation}
    _, file = convert_small(tmp_path, LLAMA | {"eos_token_id": own}, **files)
    assert (end_ids(file) if "end_ids" in file.blobs else None) == ids


def test_end_ids_outside_the_vocabulary_are_left_out_and_told(tmp_path):
    files = {"generation_config__json": {"eos_token_id": [9, 3]}}
    report, file = convert_small(tmp_path, LLAMA | {"eos_token_id": [2, -1]}, **files)
    assert end_ids(file) == [2, 3]
    assert [note.split(" is ")[0] for note in report.notes] == [
        "config.json: eos_token_id -1",
        "generation_config.json: eos_token_id 9",
    ]


def test_special_ids_of_the_tokenizer(tmp_path):
    """Where config.json has none: those that tokenizer_config.json names."""
    config = LLAMA | {"eos_token_id": None, "bos_token_id": None}
    added = [{"id": 5, "content": "<s>"}, {"id": 6, "content": "</s>"}, {"content": 3}, 7]
    files = {
        "tokenizer_config__json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        "tokenizer__json": {"added_tokens": added},
    }
    _, file = convert_small(tmp_path, config, **files)
    assert (file.config.bos_id, end_ids(file)) == (5, [6])
    _, file = convert_small(tmp_path, config, generation_config__json={"bos_token_id": 4}, **files)
    assert file.config.bos_id == 4
    _, file = convert_small(tmp_path, LLAMA, **files)
    assert (file.config.bos_id, end_ids(file)) == (1, [2])
    files["tokenizer__json"] = {"added_tokens": {"<s>": 5}}
    _, file = convert_small(tmp_path, config, generation_config__json={}, **files)
    assert (file.config.bos_id, "end_ids" in file.blobs) == (-1, False)


def test_a_tokenizer_that_cannot_be_used_is_told(tmp_path):
    report, _ = convert_small(tmp_path, LLAMA, tokenizer__model=b"x")
    assert "tokenizer.json, which text needs" in report.notes[0]


def test_card_and_tokenizer_go_along(tmp_path):
    _, file = convert_small(tmp_path, LLAMA, README__md="a card", tokenizer__json=b'{"a": 1}')
    assert file.blobs["card"] == b"a card"
    assert file.blobs["tokenizer.json"] == b'{"a": 1}'
    _, file = convert_small(tmp_path, LLAMA, MODEL_CARD__md="the card")
    assert file.blobs["card"] == b"the card"


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({"chat_template": "{{ messages }}"}, "{{ messages }}"),
        ({}, None),
        ({"chat_template": None}, None),
        (
            {
                "chat_template": [
                    {"name": "tools", "template": "T"},
                    {"name": "default", "template": "D"},
                ]
            },
            "D",
        ),
        (
            {"chat_template": "{{ bos_token }}x", "bos_token": "<s>", "eos_token": "</s>"},
            '{% set bos_token = "<s>" %}\n{{ bos_token }}x',
        ),
        (
            {"chat_template": "{{ eos_token }}", "eos_token": {"content": '<"\\\u20ac>'}},
            '{% set eos_token = "<\\"\\\\\u20ac>" %}\n{{ eos_token }}',
        ),
        ({"chat_template": "{{ bos_token }}", "bos_token": None}, "{{ bos_token }}"),
    ],
)
def test_chat_template(tmp_path, settings, template):
    _, file = convert_small(tmp_path, LLAMA, tokenizer_config__json=settings)
    found = file.blobs.get("chat_template")
    assert (found and found.decode()) == template


def test_chat_template_file_wins(tmp_path):
    _, file = convert_small(
        tmp_path,
        LLAMA,
        tokenizer_config__json={"chat_template": "old"},
        chat_template__jinja="new",
    )
    assert file.blobs["chat_template"] == b"new"


def test_odd_chat_templates_are_refused(tmp_path):
    refused(tmp_path, "chat_template is 3", tokenizer_config__json={"chat_template": 3})
    surrogate = {"chat_template": "\ud800"}
    refused(tmp_path, "no Unicode text", tokenizer_config__json=surrogate)
    listed = {"chat_template": [{"name": [], "template": "x"}]}
    _, file = convert_small(tmp_path, LLAMA, tokenizer_config__json=listed)
    assert "chat_template" not in file.blobs
    refused(tmp_path, "chat_template.jinja is not UTF-8", chat_template__jinja=b"\xff")


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"model_type": "mistral", "max_position_embeddings": 32768}, 4096),  # a missing key
        ({"model_type": "mistral", "sliding_window": 32, "use_sliding_window": False}, 32),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_position_embeddings": 9999},
            4096,
        ),
    ],
)
def test_windows_that_count(tmp_path, keys, window):
    refused(tmp_path, f"sliding_window is {window}", LLAMA | keys, random_tensors(LLAMA))


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 32768},
        {"model_type": "mistral", "sliding_window": 64},
        {"sliding_window": 8, "use_sliding_window": False},
        {"pretraining_tp": 2},
    ],
)
def test_keys_without_effect_on_these_models(tmp_path, keys):
    report, _ = convert_small(tmp_path, LLAMA | keys, random_tensors(LLAMA))
    assert report.unknown_keys == []


def test_yarn_takes_the_original_positions_from_wherever_they_are(tmp_path):
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "finetuned": True}}
    _, file = convert_small(tmp_path, LLAMA | yarn)
    assert file.config.rope_original_positions == 64
    top = {"original_max_position_embeddings": 16}
    report, file = convert_small(tmp_path, LLAMA | yarn | top)
    assert (file.config.rope_original_positions, report.unknown_keys) == (16, [])


def test_rope_in_both_spellings(tmp_path):
    both = {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    }
    _, file = convert_small(tmp_path, LLAMA | both)
    assert (file.config.rope_scaling, file.config.rope_factor) == (1, 2.0)
    both["rope_scaling"]["factor"] = 3.0
    refused(tmp_path, "rope_parameters is there too", LLAMA | both)


def test_the_checkpoint_is_never_replaced(tmp_path):
    convert_small(tmp_path, LLAMA)
    weights = next(tmp_path.rglob("model.safetensors"))
    before = weights.read_bytes()
    with pytest.raises(CheckpointError, match="part of the checkpoint"):
        convert(weights.parent, weights)
    assert weights.read_bytes() == before
