"""config.json as a family reads it: values checked, and no key passed over in silence."""

import sys
from typing import Any

from ..checkpoint import CheckpointError
from ..config import RANGES

# Keys that say how a model was trained, stored or sampled, but not what it computes.
_WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "do_sample",
    "dtype",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_length",
    "max_new_tokens",
    "model_max_length",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
}
_MISSING = object()


class Keys:
    """An object of config.json: checks each value and remembers which keys were read.

    A key that is null counts as missing. Errors are CheckpointErrors that give key and value.
    """

    def __init__(self, values: dict[str, Any], name: str = "config.json") -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._stated = values.keys()
        self._name = name
        self._read: set[str] = set()
        self._nested: dict[str, Keys] = {}

    def __contains__(self, key: str) -> bool:
        """Whether the key is there with a value that is not null."""
        return key in self._values

    def states(self, key: str) -> bool:
        """Whether the key is there, be it null: then its default is not meant."""
        return key in self._stated

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of any type; without a default a missing key is an error."""
        self._read.add(key)
        value = self._values.get(key, default)
        if value is _MISSING:
            raise CheckpointError(f"{self._name} has no {key}")
        return value

    def refuse(self, key: str, allowed: str) -> CheckpointError:
        """The error for a value that is not allowed."""
        return CheckpointError(f"{self._name}: {key} is {self._values.get(key)!r}; {allowed}")

    def integer(self, key: str, default: Any = _MISSING, *, field: str = "", low: int = 0) -> int:
        """An integer in the range of the config field that it is for, or else from `low` on.

        A default need not be in that range.
        """
        value = self.get(key, default)
        if key not in self._values:
            return int(value)
        bounds = RANGES.get(field, (low, 2**63 - 1))
        if type(value) is not int or not bounds[0] <= value <= bounds[1]:
            raise self.refuse(key, f"it must be an integer from {bounds[0]} to {bounds[1]}")
        return value

    def token(self, key: str) -> int:
        """A token id; -1 if there is none."""
        return self.integer(key, -1, low=-1)

    def positive(self, key: str, default: Any = _MISSING) -> float:
        """A finite number above zero."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.refuse(key, "it must be a number above 0")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "it must be true or false")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuses the key unless it is missing or has one of the allowed values."""
        value = self.get(key, allowed[0])
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise self.refuse(key, "supported: " + ", ".join(map(repr, allowed)))

    def unset(self, *names: str) -> None:
        """Refuses keys of options that are not supported, unless null, false, 0 or empty."""
        for key in names:
            if self.get(key, None):
                raise self.refuse(key, "this option is not supported; it must be off or left out")

    def ignore(self, *names: str) -> None:
        """Takes keys that a family knows and that do not change what the model computes."""
        self._read.update(names)

    def mapping(self, key: str) -> "Keys | None":
        """A nested object as Keys of its own; None if the key is missing."""
        value = self.get(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "it must be an object")
        return self._nested.setdefault(key, Keys(value, f"{self._name}: {key}"))

    def says_all_of(self, other: "Keys") -> bool:
        """Whether it has every key of another object, with the same values."""
        return other._values.items() <= self._values.items()

    def unread(self) -> list[str]:
        """Keys that were not read and are not known to have no effect, nested ones as a.b."""
        unread = self._values.keys() - self._read - _WITHOUT_EFFECT
        nested = {f"{key}.{name}" for key, keys in self._nested.items() for name in keys.unread()}
        return sorted(unread | nested)
