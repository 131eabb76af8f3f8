"""The pool as the specification has it, in plain Python: what a PrefixPool must agree with."""


class PoolModel:
    """Entries in the order of registration, as (model, tokens, loops, window)."""

    def __init__(self, capacity):
        self.capacity = max(capacity, 1)
        self.entries = []

    def register(self, model, tokens, loops, window):
        """Whether the prefix had to be built."""
        key = (model, tuple(tokens), loops, window)
        if key in self.entries:
            return False
        if len(self.entries) == self.capacity:
            self.entries.remove(min(self.entries, key=lambda entry: len(entry[1])))
        self.entries.append(key)
        return True

    def match(self, model, prompt, loops, window):
        """Tokens of the longest entry that the prompt starts with; 0: none."""
        return max(
            (
                len(tokens)
                for owner, tokens, *rest in self.entries
                if (owner, rest) == (model, [loops, window])
                and tuple(prompt[: len(tokens)]) == tokens
            ),
            default=0,
        )

    def size(self):
        return len(self.entries)

    def total_cached_tokens(self):
        return sum(len(entry[1]) for entry in self.entries)
