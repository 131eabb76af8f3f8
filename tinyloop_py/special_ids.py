"""Ids of the tokens that begin and end a text, from whichever file of a checkpoint has them."""

from typing import Any

from .checkpoint import Checkpoint
from .families import Keys


def end_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[list[int], list[str]]:
    """Ids that end a generation, and notes on those that are left out.

    They are those of config.json and what generation_config.json adds, or else the tokenizer's
    eos_token.
    """
    ids: dict[int, None] = {}
    notes = []
    for name in ("config.json", "generation_config.json"):
        keys = Keys(checkpoint.json(name) or {}, name)
        value = keys.get("eos_token_id", [])
        for token in value if isinstance(value, list) else [value]:
            if type(token) is not int:
                raise keys.refuse("eos_token_id", f"ids are 0 .. {vocab_size - 1}")
            if 0 <= token < vocab_size:
                ids[token] = None
            else:
                notes.append(f"{name}: eos_token_id {token} is no id of {vocab_size}; left out")
    if not ids and (token := tokenizer_id(checkpoint, "eos_token")) is not None:
        ids[token] = None
    return [token for token in ids if token < vocab_size], notes


def begin_id(checkpoint: Checkpoint) -> int:
    """For a config.json that states none: generation_config.json's, the tokenizer's, or -1."""
    keys = Keys(checkpoint.json("generation_config.json") or {}, "generation_config.json")
    token = tokenizer_id(checkpoint, "bos_token")
    return keys.integer("bos_token_id", -1 if token is None else token, low=-1)


def tokenizer_id(checkpoint: Checkpoint, key: str) -> int | None:
    """The id of a special token that tokenizer_config.json gives as text."""
    token: Any = (checkpoint.json("tokenizer_config.json") or {}).get(key)
    text = token.get("content") if isinstance(token, dict) else token
    added = (checkpoint.json("tokenizer.json") or {}).get("added_tokens")
    if not isinstance(text, str) or not isinstance(added, list):
        return None
    for entry in added:
        if isinstance(entry, dict) and entry.get("content") == text:
            number = entry.get("id")
            return number if type(number) is int and number >= 0 else None
    return None
