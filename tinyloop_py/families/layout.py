"""A checkpoint described, and what the families' descriptions are put together from."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..checkpoint import CheckpointError
from ..config import MAX_TENSORS, RANGES, Config, Stage
from .keys import Keys

_MAX_LAYERS = MAX_TENSORS // 8  # each has more tensors than that


# Names in the checkpoint, and those in the file of the tensors that are its rows.
Tensors = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """The config of the file to be written, and where a checkpoint has the file's tensors.

    `tensors`: for each tensor of the checkpoint those of the file that its rows are made of, in
    order; all of them together are what the config calls for. `shapes`: shapes in the checkpoint
    that are not the file's (of fused tensors: not their rows one after the other). `head`: a tied
    head, which a checkpoint may hold or not. `skipped`: tensors that are there and not needed.
    `end_ids`: those that are right where the checkpoint's are known to be wrong.
    """

    config: Config
    tensors: Tensors
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    head: str = "lm_head.weight"
    skipped: Sequence[str] = ()
    notes: Sequence[str] = ()
    end_ids: Sequence[int] | None = None


def named(names: Mapping[str, str]) -> Tensors:
    """`tensors` of a Layout from pairs (name in the file, name in the checkpoint)."""
    return {its: (own,) for own, its in names.items()}


def fused(prefix: str, parts: Iterable[str], suffix: str = "weight") -> tuple[str, ...]:
    """Names of the file's tensors whose rows follow each other in one of the checkpoint's."""
    return tuple(f"{prefix}.{part}.{suffix}" for part in parts)


def stages_of(parts: Iterable[tuple[int, int, int]]) -> list[Stage]:
    """Stages from (n_layers, looped, end_norm), without those that have no layers."""
    stages: list[Stage] = []
    first = 0
    for n_layers, looped, end_norm in parts:
        if n_layers:
            stages.append(Stage(first, n_layers, looped, end_norm))
            first += n_layers
    return stages


def layer_count(keys: Keys, key: str, low: int = 1) -> int:
    """A number of layers that a file can hold."""
    value = keys.integer(key)
    if not low <= value <= _MAX_LAYERS:
        raise keys.refuse(key, f"it must be from {low} to {_MAX_LAYERS}")
    return value


def loop_count(keys: Keys, key: str) -> int:
    """A number of loops that can be run."""
    value = keys.integer(key)
    low, high = 1, RANGES["loops_default"][1]
    if not low <= value <= high:
        raise keys.refuse(key, f"it must be from {low} to {high}")
    return value


def count_layers(names: Collection[str], prefix: str) -> int:
    """Layers that the names `prefix`0.., `prefix`1.. tell of: one more than the highest number."""
    numbers = {name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)}
    count = 1 + max((int(n) for n in numbers if n.isdecimal() and len(n) < 6), default=-1)
    if count > _MAX_LAYERS:
        raise CheckpointError(f"tensors {prefix}{count - 1}.*: at most {_MAX_LAYERS} layers")
    return count


def head_fields(
    keys: Keys, hidden: int, heads_keys: Sequence[str] = ("num_attention_heads",)
) -> dict[str, int]:
    """Sizes of the heads; `heads_keys` are the names that the number of heads may have."""
    heads_key = next((key for key in heads_keys if key in keys), heads_keys[0])
    heads = keys.integer(heads_key, field="n_heads")
    for key in heads_keys:
        keys.expect(key, heads)
    kv_heads = keys.integer("num_key_value_heads", heads, field="n_kv_heads")
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", f"it must divide {heads_key} {heads}")
    if "head_dim" not in keys and hidden % heads:
        raise CheckpointError(
            f"config.json has no head_dim, and {heads_key} {heads} does not divide the width "
            f"{hidden}"
        )
    head_dim = keys.integer("head_dim", hidden // heads, field="head_dim")
    low, high = RANGES["head_dim"]
    if head_dim % 2 or not low <= head_dim <= high:
        raise CheckpointError(f"head_dim is {head_dim}; it must be even, from {low} to {high}")
    return {
        "hidden_size": hidden,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": head_dim,
    }


def refuse_general(keys: Keys) -> None:
    """Refuses what some decoder might be by transformers' general keys, and none here is."""
    keys.unset(
        "add_cross_attention",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "pruned_heads",
        "quantization_config",
    )
