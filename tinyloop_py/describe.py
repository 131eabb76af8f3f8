"""What `tinyloop inspect` prints: a `.tinyloop` file in words, from the file alone."""

import textwrap
from dataclasses import fields

import numpy as np

from .config import VARIANTS, Config, is_scale
from .costs import (
    KV_ELEMENT_BYTES,
    Loops,
    attention_flops,
    default_loops,
    is_looped,
    is_nested,
    kv_bytes,
    matmul_flops,
)
from .diagram import WIDTH, draw
from .format import DTYPES, TinyloopFile

Rows = list[tuple[str, str]]

# What the drawing and the layers' rows have no place for; shown where it is not the default.
_OTHER_FIELDS = (
    "schedule",
    "restart",
    "damping",
    "clp_a",
    "clp_b",
    "clp_shift",
    "loop_norm",
    "feed_normed",
    "exit_readout",
    "kv_policy_default",
    "kv_policies_allowed",
    "lora_rank",
    "lora_alpha",
    "loop_embed",
)


def describe(file: TinyloopFile, *, tensors: bool = False) -> str:
    """The file in lines: sizes, a drawing of how it runs, its layers, what a token costs.

    With `tensors` a row for each of them too. Files that this version can't run are described as
    well; what they say is shown as it is.
    """
    config = file.config
    sections = [
        _table(_file_rows(file)),
        draw(config, _stage_parameters(file)),
        [f"each layer, x of width {config.hidden_size:,}", *_table(_layer_rows(file), indent=2)],
        _cost_lines(config),
    ]
    if tensors:
        sections.append(_table(_tensor_rows(file)))
    return "\n\n".join("\n".join(lines) for lines in sections)


def _table(rows: Rows, indent: int = 0) -> list[str]:
    """Labels in one column, texts in the next, wrapped there."""
    column = indent + max(len(label) for label, _ in rows) + 2
    lines = []
    for label, text in rows:
        left = " " * indent + label
        for part in textwrap.wrap(text, WIDTH - column, break_long_words=False) or [""]:
            lines.append(f"{left:<{column}}{part}".rstrip())
            left = ""
    return lines


# ---- The file -------------------------------------------------------------------------------


def _file_rows(file: TinyloopFile) -> Rows:
    config = file.config
    blobs = ", ".join(f"{name} {len(blob):,}" for name, blob in file.blobs.items())
    other = [
        f"{f.name} {_value(config, f.name)}"
        for f in fields(Config)
        if f.name in _OTHER_FIELDS and getattr(config, f.name) != f.default
    ]
    if is_nested(config):
        other.remove(f"schedule {_value(config, 'schedule')}")  # is in the drawing
    return [
        ("file", f"{file.path.name}, {file.size:,} bytes"),
        ("parameters", _parameters(file)),
        ("vocabulary", f"{config.vocab_size:,}; {_special_ids(file)}"),
        ("positions", f"{config.max_positions:,} trained" if config.max_positions else "unknown"),
        ("blobs", f"{blobs} bytes" if blobs else "none"),
        *([("also", ", ".join(other))] if other else []),
    ]


def _value(config: Config, name: str) -> str:
    value = getattr(config, name)
    return f"{value} ({config.variant(name)})" if name in VARIANTS else f"{value:g}"


def _counts(file: TinyloopFile) -> dict[str, int]:
    """Parameters of each tensor; the scales of int8 weights are none."""
    return {
        tensor.name: tensor.size // DTYPES[tensor.dtype].itemsize
        for tensor in file.tensors.values()
        if not is_scale(tensor.name)
    }


def _parameters(file: TinyloopFile) -> str:
    counts = _counts(file)
    by_dtype: dict[str, int] = {}
    for name, count in counts.items():
        dtype = file.tensors[name].dtype
        by_dtype[dtype] = by_dtype.get(dtype, 0) + count
    n_bytes = sum(tensor.size for tensor in file.tensors.values())
    parts = [f"{count:,} {dtype}" for dtype, count in by_dtype.items()]
    n_scales = len(file.tensors) - len(counts)
    scales = f", and scales of {n_scales:,} of them" if n_scales else ""
    return (
        f"{sum(counts.values()):,} in {len(counts):,} tensors of {n_bytes:,} bytes: "
        f"{', '.join(parts) or 'none'}{scales}"
    )


def _stage_parameters(file: TinyloopFile) -> dict[int, int]:
    """Numbers in the layers of each stage, by the stage's index."""
    by_layer: dict[int, int] = {}
    for name, count in _counts(file).items():
        kind, _, rest = name.partition(".")
        layer = rest.partition(".")[0]
        if kind == "layers" and layer.isdecimal() and len(layer) < 10:
            by_layer[int(layer)] = by_layer.get(int(layer), 0) + count
    return {
        s: sum(
            count
            for layer, count in by_layer.items()
            if stage.first_layer <= layer < stage.first_layer + stage.n_layers
        )
        for s, stage in enumerate(file.config.stages)
    }


def _special_ids(file: TinyloopFile) -> str:
    config = file.config
    raw = file.blobs.get("end_ids", b"")
    ends = [str(token) for token in np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")]
    ids = {
        "begin": str(config.bos_id) if config.bos_id >= 0 else "none",
        "end": ", ".join(ends) or "none",
        "pad": str(config.pad_id) if config.pad_id >= 0 else "none",
    }
    return "; ".join(f"{name} {value}" for name, value in ids.items())


def _tensor_rows(file: TinyloopFile) -> Rows:
    return [
        (tensor.name, f"{tensor.dtype} {list(tensor.shape)}, {tensor.size:,} bytes")
        for tensor in file.tensors.values()
    ]


# ---- A layer --------------------------------------------------------------------------------


def _layer_rows(file: TinyloopFile) -> Rows:
    config = file.config
    weight = "weightless" if config.norm_weightless else "with weight"
    rows = [
        ("attention", _block(config, "attention")),
        ("", _attention(config)),
        ("rotation", _rope(config)),
        ("mask", _mask(config)),
        ("MLP", _block(config, "MLP")),
        ("", _mlp(config)),
        ("norms", f"{config.variant('norm_placement')}, RMS {weight}, eps {config.norm_eps:g}"),
    ]
    if config.value_embed:
        rows.insert(3, ("values", _value_embed(file)))
    return rows


def _block(config: Config, name: str) -> str:
    return {
        0: f"x = x + {name}(in(x))",
        1: f"x = x + out({name}(in(x)))",
        2: f"x = out(x + {name}(in(x)))",
        3: f"x = x + out({name}(x))",
    }.get(config.norm_placement, config.variant("norm_placement"))


def _attention(config: Config) -> str:
    biases = [part for part in "qkvo" if getattr(config, f"{part}_bias")]
    parts = [f"{config.n_heads} heads of {config.head_dim}, {config.n_kv_heads} KV heads"]
    if biases:
        parts.append(f"bias on {', '.join(biases)}")
    if config.qk_norm:
        weight = ", weightless" if config.qk_norm_weightless else ""
        order = "after" if config.qk_norm_after_rope else "before"
        parts.append(
            f"q and k normed over {config.variant('qk_norm')} {order} the rotation{weight}, "
            f"eps {config.qk_norm_eps:g}"
        )
    if config.attn_out_gate:
        gate = {1: "sigmoid(gate x)"}.get(config.attn_out_gate, config.variant("attn_out_gate"))
        parts.append(f"heads' output times {gate}")
    return "; ".join(parts)


def _rope(config: Config) -> str:
    if config.rope_style == 2:
        return "none"
    text = (
        f"{config.variant('rope_style')} pairs, theta {_number(config.rope_theta)}, "
        f"{config.rotary_dim} of {config.head_dim} channels"
    )
    if config.rope_scaling:
        text += f"; {config.variant('rope_scaling')} scaling by {config.rope_factor:g}"
    match config.rope_scaling:
        case 2:
            low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
            text += f" from {config.rope_original_positions:,} positions, factors {low:g}, {high:g}"
        case 3:
            fast, slow = config.rope_beta_fast, config.rope_beta_slow
            text += (
                f" from {config.rope_original_positions:,} positions, betas {fast:g}, {slow:g}, "
                f"attention factor {config.rope_attention_factor:g}"
            )
    return text


def _number(value: float) -> str:
    return f"{int(value):,}" if value.is_integer() and abs(value) < 1e15 else f"{value:g}"


def _mask(config: Config) -> str:
    if config.mask == 1:
        return "prefix-LM: the first prefix_len tokens see each other, the others are causal"
    return config.variant("mask")


def _value_embed(file: TinyloopFile) -> str:
    config = file.config
    if config.value_embed != 1:
        return config.variant("value_embed")
    names = [name for name in file.tensors if name.endswith(".attn.value_gate.weight")]
    layers = ", ".join(name.split(".")[1] for name in names)
    return (
        f"v = v + 2 sigmoid(value_gate x[:{config.value_embed_channels}]) value_embed[token], "
        f"in layers {layers or '(none)'}"
    )


def _mlp(config: Config) -> str:
    scale = "" if config.activation_scale == 1 else f"{config.activation_scale:g} "
    activation = scale + config.variant("activation")
    formula = {
        0: f"MLP(x) = down({activation}(gate x) * up x)",
        1: f"MLP(x) = down({activation}(up x))",
    }.get(config.mlp_kind, f"{config.variant('mlp_kind')}, {activation}")
    bias = ", with biases" if config.mlp_bias else ""
    return f"{formula}{bias}; {config.ff_size:,} wide"


# ---- Costs ----------------------------------------------------------------------------------


def _cost_lines(config: Config) -> list[str]:
    """A table with a column for each of some loops."""
    columns = _shown_loops(config)
    table = [
        ["a token costs", *(_loops_title(config, loops) for loops in columns)],
        ["  matrix products", *(_flops(matmul_flops(config, loops)) for loops in columns)],
        [
            "  attention, each position",
            *(_flops(attention_flops(config, loops)) for loops in columns),
        ],
    ]
    for mode in KV_ELEMENT_BYTES:
        sizes = [kv_bytes(config, loops, mode) for loops in columns]
        table.append([f"  KV cache, {mode}", *(_bytes(size.growing) for size in sizes)])
        if any(size.constant for size in sizes):
            label = "    constant, of loop_window"
            table.append([label, *(_bytes(size.constant) for size in sizes)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "   ".join(
            [f"{row[0]:<{widths[0]}}"]
            + [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in table
    ]


def _shown_loops(config: Config) -> list[Loops]:
    """The fewest, the default, and the most that the model was trained with."""
    default = default_loops(config)
    if isinstance(default, tuple):
        return [(1, 1), default] if default > (1, 1) else [default]
    if not is_looped(config):
        return [1]
    return sorted({config.loops_min or 1, default, config.loops_max_trained or default})


def _loops_title(config: Config, loops: Loops) -> str:
    if isinstance(loops, tuple):
        title = f"H {loops[0]}, L {loops[1]}"
    elif not is_looped(config):
        return "without loops"
    else:
        title = f"{loops} loop{'s' * (loops != 1)}"
    return title + (" (default)" if loops == default_loops(config) else "")


def _flops(n: int) -> str:
    for power, prefix in ((12, "T"), (9, "G"), (6, "M")):
        if n >= 10**power:
            return f"{n / 10**power:,.1f} {prefix}FLOP"
    return f"{n:,} FLOP"


def _bytes(n: int) -> str:
    for power, prefix in ((30, "G"), (20, "M"), (10, "K")):
        if n >= 10 * 2**power or (prefix == "K" and n >= 2**power):
            return f"{n / 2**power:,.1f}".removesuffix(".0") + f" {prefix}iB"
    return f"{n:,} bytes"
