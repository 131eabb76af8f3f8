"""What `tinyloop inspect` prints: a `.tinyloop` file in words, from the file alone."""

from .config import Config, Stage
from .format import TinyloopFile

_FP16_BYTES = 2


def describe(file: TinyloopFile, *, tensors: bool = False) -> str:
    """Sizes, wiring and contents of the file in lines; with `tensors` a row for each of them."""
    config = file.config
    rows = [
        ("file", f"{file.path.name}, {file.size:,} bytes"),
        ("parameters", f"{file.n_parameters:,} ({_dtypes(file)})"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("hidden", f"{config.hidden_size:,}"),
        ("attention", _attention(config)),
        (
            "mlp",
            f"{config.ff_size:,}, {config.variant('mlp_kind')}, {config.variant('activation')}",
        ),
        ("norms", _norms(config)),
        ("rope", _rope(config)),
        ("head", "tied to the embedding" if config.tied_head else "own tensor"),
        ("positions", f"{config.max_positions:,} trained" if config.max_positions else "unknown"),
        ("mask", config.variant("mask")),
        *((f"stage {s}", _stage(stage)) for s, stage in enumerate(config.stages)),
        ("loops", _loops(config)),
        ("state", f"starts as {config.variant('state_init')}"),
        ("injection", _injection(config)),
        ("exit", config.variant("exit_mode")),
        ("KV cache", _kv(config)),
        ("blobs", ", ".join(f"{n} {len(b):,} bytes" for n, b in file.blobs.items()) or "none"),
    ]
    if tensors:
        rows += [
            (tensor.name, f"{tensor.dtype} {list(tensor.shape)}, {tensor.size:,} bytes")
            for tensor in file.tensors.values()
        ]
    width = max(len(label) for label, _ in rows) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in rows)


def kv_bytes_per_token(config: Config, loops: int) -> int:
    """Bytes that the fp16 KV cache grows by with each token, over all layers and loops.

    A head's value takes whole vectors of 16 channels (libtinyloop/kv/layout.h).
    """
    runs = sum(stage.n_layers * (loops if stage.looped else 1) for stage in config.stages)
    value_dim = (config.head_dim + 15) // 16 * 16
    return config.n_kv_heads * (config.head_dim + value_dim) * _FP16_BYTES * runs


def _dtypes(file: TinyloopFile) -> str:
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
    return ", ".join(f"{count} {dtype} tensors" for dtype, count in counts.items())


def _attention(config: Config) -> str:
    biases = [part for part in "qkvo" if getattr(config, f"{part}_bias")]
    parts = [f"{config.n_heads} heads of {config.head_dim}, {config.n_kv_heads} KV heads"]
    if biases:
        parts.append(f"bias on {', '.join(biases)}")
    if config.qk_norm:
        parts.append(f"qk-norm over {config.variant('qk_norm')}")
    if config.loop_attention:
        parts.append(f"{config.variant('loop_attention')}, window {config.loop_window}")
    return ", ".join(parts)


def _norms(config: Config) -> str:
    weight = ", weightless" if config.norm_weightless else ""
    final = config.variant("final_norm")
    return f"{config.variant('norm_placement')}{weight}, eps {config.norm_eps:g}; final: {final}"


def _rope(config: Config) -> str:
    text = (
        f"{config.variant('rope_style')}, theta {config.rope_theta:g}, {config.rotary_dim} channels"
    )
    if config.rope_scaling:
        text += f", {config.variant('rope_scaling')} scaling by {config.rope_factor:g}"
    return text


def _stage(stage: Stage) -> str:
    last = stage.first_layer + stage.n_layers - 1
    layers = f"layer {last}" if stage.n_layers == 1 else f"layers {stage.first_layer} to {last}"
    runs = "looped" if stage.looped else "once"
    norm = {0: "", 1: ", norm after each run", 2: ", weightless norm after each run"}
    return f"{layers}, {runs}{norm.get(stage.end_norm, f', end_norm {stage.end_norm}')}"


def _loops(config: Config) -> str:
    if not any(stage.looped for stage in config.stages):
        return "none"
    low, high = config.loops_min or 1, config.loops_max or 1024
    trained = f", trained up to {config.loops_max_trained}" if config.loops_max_trained else ""
    return f"{config.loops} by default, {low} to {high} allowed{trained}"


def _injection(config: Config) -> str:
    if not config.inject:
        return "none"
    return f"{config.variant('inject')} {config.variant('inject_source')}"


def _kv(config: Config) -> str:
    n_bytes = kv_bytes_per_token(config, config.loops)
    return f"{n_bytes:,} bytes a token (fp16, loops {config.loops})"
