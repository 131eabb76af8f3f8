"""Text to token ids and back, and chat templates, from the blobs that a model file carries."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

_REPLACEMENT = "\ufffd"

Message = Mapping[str, str]


class TextError(ValueError):
    """A model without tokenizer or chat template, a damaged one, or text that it cannot take."""


class Tokenizer:
    """The tokenizer and the chat template of one model.

    `blob(name)` gives a blob of the model's file, or None: pass a model's `blob` method. Raises
    TextError if there is no tokenizer or it cannot be read.
    """

    def __init__(self, blob: Callable[[str], bytes | None]) -> None:
        definition = blob("tokenizer.json")
        if definition is None:
            raise TextError("the model file has no tokenizer.json; pass token ids instead of text")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(definition)
        except Exception as error:  # the package raises no narrower class
            raise TextError(f"the model's tokenizer.json cannot be used: {error}") from None
        template = blob("chat_template")
        self._chat_template = None if template is None else template.decode("utf-8", "replace")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text, with the tokens that the tokenizer itself adds around it.

        Special tokens that stand in the text become their ids, in text from users too.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TextError("the text has half a surrogate pair and is not Unicode") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of the rendered messages; nothing is added around them."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_stream(
        self, ids: Iterable[int], *, skip_special_tokens: bool = True
    ) -> Iterator[str]:
        """The text in pieces, as the ids come; joined, they are what `decode` gives for all.

        A character that takes several tokens comes whole, with the last of them.
        """
        # The piece before is decoded again with what follows: decoders treat the start of a text
        # differently. `given` of the window's ids have been given out.
        window: list[int] = []
        given = 0
        shown = text = ""
        for token in ids:
            window.append(token)
            text = self.decode(window, skip_special_tokens=skip_special_tokens)
            if len(text) > len(shown) and not text.endswith(_REPLACEMENT):
                yield text[len(shown) :]
                window, given = window[given:], len(window) - given
                shown = text = self.decode(window, skip_special_tokens=skip_special_tokens)
        if len(text) > len(shown):
            yield text[len(shown) :]

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The messages (each with `role` and `content`) as the model's chat template writes them.

        The template runs in a sandbox. Raises TextError if there is none or it fails.
        """
        if self._chat_template is None:
            raise TextError("the model file has no chat template; write the prompt out instead")
        try:
            template = _compile(self._chat_template)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template can fail in any way that Python code can
            raise TextError(f"the model's chat template failed: {error}") from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Without the escapes that jinja2's own filter makes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """A template with the functions and whitespace rules that chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)
