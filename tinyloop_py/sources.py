"""Where each tensor of a `.tinyloop` file comes from: a run of elements of a checkpoint's tensor.

That the checkpoint has every tensor that its config calls for, in the right shape and no other, is
checked here.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from .checkpoint import Checkpoint, CheckpointError
from .config import Config, Shape, scale_name, tensor_problems, tensor_shapes, value_embed_layers
from .families import Layout

_NAMES_SHOWN = 5


class Source(NamedTuple):
    """The file's tensor `name`: elements from `first` on of the checkpoint's tensor `stored`."""

    name: str
    shape: Shape
    stored: str
    first: int


def find_sources(checkpoint: Checkpoint, layout: Layout) -> list[Source]:
    """The file's tensors in its order.

    Raises CheckpointError for missing, left-over and misshaped tensors of the checkpoint, and for
    a tied head that is not the embedding.
    """
    shapes = _file_shapes(layout)
    wanted = {name: _stored_shape(name, layout, shapes) for name in layout.tensors}
    _check_tensors(checkpoint, layout, wanted)
    if layout.config.tied_head:
        _check_tied_head(checkpoint, layout)
    sources = {}
    for stored, parts in layout.tensors.items():
        first = 0
        for name in parts:
            sources[name] = Source(name, shapes[name], stored, first)
            first += prod(shapes[name])
    return [sources[name] for name in shapes]


def described_sources(checkpoint: Checkpoint, config: Config) -> list[Source]:
    """The same of a checkpoint that has the file's own tensors by their names."""
    found = {name: (checkpoint.dtype(name), t.shape) for name, t in checkpoint.tensors.items()}
    if problems := tensor_problems(config, found):
        raise CheckpointError(f"tensors: {_list(problems, '; ')}")
    shapes = tensor_shapes(config, value_embed_layers(config, found))
    sources = []
    for name, shape in shapes.items():
        sources.append(Source(name, shape, name, 0))
        if found[name][0] == "int8":
            scales = scale_name(name)
            sources.append(Source(scales, found[scales][1], scales, 0))
    return sources


def _file_shapes(layout: Layout) -> dict[str, Shape]:
    names = {name for parts in layout.tensors.values() for name in parts}
    return tensor_shapes(layout.config, value_embed_layers(layout.config, names))


def _stored_shape(name: str, layout: Layout, shapes: Mapping[str, Shape]) -> Shape:
    """A fused tensor has the rows of its parts, one after the other."""
    if name in layout.shapes:
        return layout.shapes[name]
    parts = [shapes[part] for part in layout.tensors[name]]
    return (sum(shape[0] for shape in parts), *parts[0][1:])


def _check_tensors(checkpoint: Checkpoint, layout: Layout, wanted: Mapping[str, Shape]) -> None:
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(f"tensors missing: {_list(missing)}")
    for name, shape in wanted.items():
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found)}; config.json asks for {list(shape)}"
            )
    known = {*wanted, *layout.skipped, *([layout.head] if layout.config.tied_head else [])}
    unread = sorted(checkpoint.tensors.keys() - known)
    if unread:
        raise CheckpointError(f"tensors that config.json does not call for: {_list(unread)}")


def _check_tied_head(checkpoint: Checkpoint, layout: Layout) -> None:
    """A head that is stored although it is tied must be the embedding, byte for byte."""
    if layout.head not in checkpoint.tensors:
        return
    embed = next(name for name, parts in layout.tensors.items() if parts == ("embed.weight",))
    stored, wanted = checkpoint.tensors[layout.head], checkpoint.tensors[embed]
    same = (stored.dtype, stored.shape) == (wanted.dtype, wanted.shape) and all(
        a.tobytes() == b.tobytes()
        for a, b in zip(checkpoint.read(layout.head), checkpoint.read(embed), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"tensor {layout.head} differs from {embed}, although config.json says that they are "
            f"tied; say there that they are not, or leave {layout.head} out"
        )


def _list(names: Iterable[str], separator: str = ", ") -> str:
    names = list(names)
    more = len(names) - _NAMES_SHOWN
    return separator.join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
