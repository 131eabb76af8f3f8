"""The families of tests/data: small checkpoints of public models, with the numbers that their
original code gives; as files that the library runs, and as cases with the arguments they take.
"""

import atexit
import functools
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from conftest import DATA, Golden
from random_models import write_model

from tinyloop_py.convert import convert
from tinyloop_py.format import read_file

FAMILIES = sorted(path.parent.name for path in DATA.glob("*/config.json"))
PREFIX_LM = ["hrm_text"]
NOISE = ["huginn", "parcae", "recurrent_llama", "recurrent_olmo", "recurrent_tinyllama"]

golden = functools.cache(Golden)


class Case(NamedTuple):
    """Golden values `tensors` (kind -> name) of one prompt, and `model.logits`'s arguments."""

    id: str
    tokens: list[int]
    loops: int | tuple[int, int]
    prefix_len: int
    given_state: bool  # start from the rows of the family's init_state, else from zeros
    tensors: dict[str, str]
    greedy: dict | None

    def arguments(self, family, n=None):
        """Keyword arguments for the prompt, or for n tokens of its continuation."""
        n = len(self.tokens) if n is None else n
        arguments = {"loops": self.loops}
        if self.prefix_len:
            arguments["prefix_len"] = self.prefix_len
        if self.given_state:
            arguments["init_state"] = golden(family)["init_state"][:n]
        return arguments


def cases(family):
    meta = golden(family).meta
    for case in meta["cases"]:
        loops, init = case["loops"], case["init"]
        if isinstance(loops, str):  # "H2L3"
            loops = tuple(int(number) for number in re.findall(r"\d+", loops))
        yield Case(
            case["id"],
            meta["prompts"][case["prompt"]],
            loops,
            int(init.removeprefix("prefix")) if init.startswith("prefix") else 0,
            init == "state",
            case["tensors"],
            case.get("greedy"),
        )


@functools.cache
def _folder():
    folder = tempfile.mkdtemp(prefix="families-")
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


@functools.cache
def converted(family):
    """The family's .tinyloop file, with the checkpoint's dtype."""
    path = _folder() / f"{family}.tinyloop"
    convert(DATA / family, path)
    return path


def read_model(path):
    """A file's config, and each tensor's dtype and elements by name."""
    file = read_file(path)
    return file.config, {name: (t.dtype, file.array(name)) for name, t in file.tensors.items()}


def write_changed(path, family, **fields):
    """The family's model with other config fields."""
    config, tensors = read_model(converted(family))
    write_model(path, replace(config, **fields), tensors)
    return path
