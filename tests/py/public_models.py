"""Configurations of public models in their real sizes: what follows from them needs no weights."""

from tinyloop_py.config import Config, Stage, stage_fields


def config(stages, shape, heads, **fields):
    """`shape`: vocabulary, width, MLP width; `heads`: query heads, KV heads, channels."""
    vocab_size, hidden_size, ff_size = shape
    n_heads, n_kv_heads, head_dim = heads
    rope = {"rope_theta": 1e4, "rotary_dim": head_dim}
    fields = {"norm_eps": 1e-6, **rope, **stage_fields(stages), **fields}
    return Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ff_size=ff_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        **fields,
    )


def core(before, looped, after):
    """A prelude, a looped stage and a coda of so many layers."""
    return [
        Stage(0, before, 0, 0),
        Stage(before, looped, 1, 0),
        Stage(before + looped, after, 0, 0),
    ]


def noise(std, scale):
    return {"state_init": 3, "init_std": std, "init_cut": 3.0, "init_scale": scale}


def ouro(n_layers):
    return config(
        [Stage(0, n_layers, 1, 1)],
        (49152, 2048, 5632),
        (16, 16, 128),
        norm_placement=1,
        final_norm=0,
        rope_theta=1e6,
        max_positions=65536,
        bos_id=1,
        pad_id=0,
        loops_default=4,
        loops_max_trained=4,
        exit_mode=1,
        exit_threshold=1.0,
    )


def retrofit(looped, shape, heads, **fields):
    fields = noise(0.014, 1.0) | {"loops_default": 8, "loops_max_trained": 32} | fields
    return config(core(4, looped, 4), shape, heads, inject=2, inject_source=1, **fields)


OURO_1B = ouro(24)
OURO_3B = ouro(48)
HUGINN = config(
    core(2, 4, 2),
    (65536, 5280, 17920),
    (55, 55, 96),
    norm_placement=2,
    rope_style=1,
    rope_theta=5e4,
    max_positions=4096,
    q_bias=1,
    k_bias=1,
    embed_scale=5280**0.5,
    tied_head=1,
    **noise(0.0087, 5280**0.5),
    inject=2,
    inject_source=1,
    norm_after_last=1,
    loops_default=32,
    loops_max_trained=64,
)
RECURRENT_TINYLLAMA = retrofit(8, (32000, 2048, 5632), (32, 4, 64))
RECURRENT_LLAMA = retrofit(
    6,
    (128256, 2048, 8192),
    (32, 8, 64),
    rope_theta=5e5,
    rope_scaling=2,
    rope_factor=32.0,
    rope_low_freq_factor=1.0,
    rope_high_freq_factor=4.0,
    rope_original_positions=8192,
)
RECURRENT_OLMO = retrofit(
    6, (100352, 2048, 8192), (16, 16, 128), norm_placement=3, qk_norm=2, qk_norm_eps=1e-6
)
IQUEST_40B = config(
    [Stage(0, 80, 1, 0)],
    (76800, 5120, 27648),
    (40, 8, 128),
    rope_theta=5e5,
    loops_default=2,
    loops_min=2,
    loops_max=2,
    loops_max_trained=2,
    loop_attention=1,
    loop_window=64,
)
NANBEIGE_3B = config(
    [Stage(0, 22, 1, 1)],
    (166144, 3072, 10752),
    (48, 8, 128),
    final_norm=0,
    rope_theta=7e7,
    loops_default=2,
    loops_max_trained=2,
)
HRM_TEXT_1B = config(
    [Stage(0, 16, 1, 2), Stage(16, 16, 1, 2)],
    (65536, 1536, 4096),
    (12, 12, 128),
    norm_weightless=1,
    final_norm=0,
    embed_scale=39.19,
    attn_out_gate=1,
    mask=1,
    schedule=1,
    cycles_high=2,
    cycles_low=3,
    state_init=4,
    inject=1,
    inject_source=2,
)
PARCAE_1B = config(
    core(8, 8, 8),
    (32768, 1536, 6144),
    (12, 12, 128),
    rope_style=1,
    qk_norm=1,
    qk_norm_after_rope=1,
    qk_norm_weightless=1,
    qk_norm_eps=2.0**-23,
    value_embed=1,
    value_embed_channels=32,
    mlp_kind=1,
    activation=3,
    activation_scale=0.5,
    tied_head=1,
    **noise(0.016, 1.0),
    inject=3,
    inject_source=1,
    prelude_norm=1,
    state_out_proj=1,
    loops_default=8,
)
LLAMA = config(
    [Stage(0, 4, 0, 0)], (288, 64, 168), (4, 2, 16), rope_theta=5e5, bos_id=1, max_positions=2048
)
