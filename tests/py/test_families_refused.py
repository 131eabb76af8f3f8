"""Families: keys and values of config.json that are refused, each by its name."""

import pytest
from checkpoints import LLAMA, golden_checkpoint, refused

REFUSED = {
    "ouro": [
        ({"early_exit_step": 2}, "early_exit_step is 2"),
        ({"early_exit_threshold": 0}, "early_exit_threshold is 0"),
        ({"total_ut_steps": None}, "has no total_ut_steps"),
        ({"total_ut_steps": 0}, "total_ut_steps is 0; it must be from 1 to 1024"),
        ({"total_ut_steps": 1025}, "total_ut_steps is 1025"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
         "sliding_window is 64"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is ["),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "type is 'dynamic'"),
        ({"num_hidden_layers": 2}, "does not call for: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 4}, "tensors missing: model.layers.3.input_layernorm.weight"),
    ],
    "nanbeige": [
        ({option: value}, f"{option} is {value!r}; this option is not supported")
        for option, value in [
            ("loop_share_kv", True),
            ("enable_double_loop_split", True),
            ("loop_middle_layers", [1]),
            ("enable_hyper_connection", True),
            ("enable_mhc", True),
            ("enable_depth_attention", 1),
            ("emb_neighbor_num", 2),
            ("qk_layernorm", True),
        ]
    ]
    + [
        ({"num_loops": 0}, "num_loops is 0"),
        ({"num_loops": "2"}, "num_loops is '2'"),
        ({"loop_loss_weights": 3}, "loop_loss_weights is 3"),
        ({"loop_loss_weights": [1] * 1024}, "loop_loss_weights is ["),
        ({"skip_loop_final_norm": 1}, "skip_loop_final_norm is 1"),
        ({"kv_channels": 8}, "kv_channels is 8; supported: 16"),
    ],
    "iquest_loop": [
        ({"loop_num": 3}, "loop_num is 3; supported: 2"),
        ({"loop_num": None}, "has no loop_num"),
        ({"loop_window_size": 0}, "loop_window_size is 0"),
        ({"loop_window_size": None}, "has no loop_window_size"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "iquestpltcoder"}, "model_type is 'iquestpltcoder'; supported: "),
    ],
    "huginn": [
        ({"injection_type": "add"}, "injection_type is 'add'; supported: 'linear'"),
        ({"state_init": "zero"}, "state_init is 'zero'; supported: 'like-init'"),
        ({"mlp_class_name": "BaseMLP"}, "mlp_class_name is 'BaseMLP'"),
        ({"nonlin_name": "GELU"}, "nonlin_name is 'GELU'"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name is 'LayerNorm'"),
        ({"bias": True}, "bias is True"),
        ({"test_time_noise": 0.1}, "test_time_noise is 0.1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0; rope_base is 50000.0"),
        ({"n_heads": 4, "num_attention_heads": 8}, "num_attention_heads is 8; supported: 4"),
        ({"num_key_value_heads": 2}, "qk_bias is True; that takes as many KV heads as heads"),
        ({"qk_bias": False}, "does not call for: transformer.coda.0.attn.qk_bias"),
        ({"qk_bias": "yes"}, "qk_bias is 'yes'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False; supported: True"),
        ({"tie_embeddings": False}, "tensors missing: lm_head.weight"),
        ({"n_layers_in_recurrent_block": 0}, "n_layers_in_recurrent_block is 0"),
        ({"n_layers_in_prelude": 1}, "does not call for: transformer.prelude.1.attn.Wqkv.weight"),
        ({"n_layers_in_coda": 2}, "tensors missing: transformer.coda.1"),
        ({"mean_recurrence": 2000}, "mean_recurrence is 2000"),
        ({"padded_vocab_size": 320}, "tensor transformer.wte.weight has shape [256, 64]"),
        ({"init_values": {"std": 0}}, "init_values: std is 0"),
        ({"init_values": [1]}, "init_values is [1]"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is {'bits': 8}"),
    ],
    "recurrent_llama": [
        ({"initial_state_mode": "embed-init"}, "initial_state_mode is 'embed-init'"),
        ({"rope_theta": None}, "has no rope_theta"),
        ({"rope_scaling": {"type": "ntk"}}, "type is 'ntk'"),
        ({"qk_bias": True}, "qk_bias is True; that takes as many KV heads as heads"),
        ({"intermediate_size": 127}, "transformer.prelude.0.mlp.fc.weight has shape [256, 64]"),
        ({"init_values": {"embed_scale": "1"}}, "embed_scale is '1'"),
    ],
    "recurrent_olmo": [
        ({"initial_state_mode": "skip-adapter"}, "initial_state_mode is 'skip-adapter'"),
        ({"qk_bias": True}, "tensors missing: transformer.prelude.0.attn.qk_bias"),
        ({"num_key_value_heads": 2}, "attn.k_norm.weight has shape [64]"),
    ],
    "hrm_text": [
        ({"H_cycles": 0}, "H_cycles is 0; it must be from 1 to 1024"),
        ({"L_cycles": None}, "has no L_cycles"),
        ({"num_layers_per_stack": 3}, "num_layers_per_stack is 3"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3; supported: 2, 4, 16"),
        ({"prefix_lm": 1}, "prefix_lm is 1"),
        ({"embedding_scale": 0}, "embedding_scale is 0"),
        ({"embedding_scale": None, "initializer_range": None}, "has no initializer_range"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 2}, "gqkv_proj.weight has shape [256, 64]; config.json asks for"),
    ],
    "parcae": [
        ({"injection_type": "linear"}, "injection_type is 'linear'; supported: 'diagonal'"),
        ({"init_strategy": "takase"}, "init_strategy is 'takase'; supported: 'scaled-zero'"),
        ({"nonlin_name": "SiLU"}, "nonlin_name is 'SiLU'"),
        ({"mlp_class_name": "GatedMLP"}, "mlp_class_name is 'GatedMLP'"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name is 'LayerNorm'"),
        ({"block_class_name": "SandwichBlock"}, "block_class_name is 'SandwichBlock'"),
        ({"model_class_name": "GPT"}, "model_class_name is 'GPT'"),
        ({"_class_name": "GPTConfig"}, "config.json has no model_type"),
        ({"state_init": "zero"}, "state_init is 'zero'"),
        ({"recurrent_embedding_dimension": 32}, "recurrent_embedding_dimension is 32"),
        (
            {"recurrent_intermediation_embedding_dimension": 96},
            "recurrent_intermediation_embedding_dimension is 96",
        ),
        ({"recurrent_num_attention_heads": 2}, "recurrent_num_attention_heads is 2"),
        ({"use_abacus": True}, "use_abacus is True"),
        ({"randomize_positions_from": 128}, "randomize_positions_from is 128"),
        ({"qk_bias": True}, "qk_bias is True"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"logit_softcap": 30.0}, "logit_softcap is 30.0"),
        ({"debias_attention": True}, "debias_attention is True"),
        ({"center_attention": True}, "center_attention is True"),
        ({"mup_model_scaling_factor": 2}, "mup_model_scaling_factor is 2"),
        ({"rope_settings": {"use_rope": False}}, "rope_settings: use_rope is False"),
        ({"rope_settings": {"rope_condense_ratio": 2}}, "rope_condense_ratio is 2"),
        ({"prelude_norm": False}, "does not call for: transformer.ln_prelude.weight"),
    ],
    "qwen2": [
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0},
         "sliding_window is 4096"),
        ({"use_sliding_window": 1}, "use_sliding_window is 1"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_mrope": True}, "use_mrope is True"),
    ],
    "qwen3": [
        ({"attention_bias": True}, "tensors missing: model.layers.0.self_attn.q_proj.bias"),
        ({"use_sliding_window": True, "sliding_window": True, "max_window_layers": 0},
         "sliding_window is True"),
    ],
    "llama": [
        ({"model_type": "mistral", "sliding_window": 2047}, "sliding_window is 2047"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": None},
         "sliding_window is 4096"),
        ({"model_type": "qwen2"}, "tensors missing: model.layers.0.self_attn.q_proj.bias"),
        ({"model_type": "qwen3"}, "tensors missing: model.layers.0.self_attn.q_norm.weight"),
        ({"model_type": "hrm_text"}, "tensors missing: model.L_module.layers.0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [(family, *case) for family, cases in REFUSED.items() for case in cases],
)
def test_refused_by_key_and_value(tmp_path, family, keys, message):
    config, tensors = golden_checkpoint(family)
    refused(tmp_path, message, config | keys, tensors)


def test_configs_of_no_family(tmp_path):
    refused(tmp_path, "config.json has no model_type", {"vocab_size": 3}, {})
    refused(tmp_path, "config.json has no model_type", {"_class_name": ["ParcaeConfig"]}, {})
    refused(tmp_path, "_class_name is 3", LLAMA | {"_class_name": 3, "model_type": "parcae"}, {})
