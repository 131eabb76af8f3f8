"""Tokenizer and chat template of the shipped model, and of small ones made here."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyloop_py import format as fmt
from tinyloop_py.text import TextError, Tokenizer

DATA = Path(fmt.__file__).parent / "data"
BLOBS = fmt.read_file(DATA / "refdesk.tinyloop").blobs
REFDESK = Tokenizer(BLOBS.get)
VOCAB = 8192
END, SYSTEM, USER, ASSISTANT = 4, 1, 2, 3


def with_template(template):
    return Tokenizer((BLOBS | {"chat_template": template.encode()}).get)


def user(text):
    return [{"role": "user", "content": text}]


# ---- Tokens ---------------------------------------------------------------------------------


@given(st.text())
def test_text_survives_encoding(text):
    ids = REFDESK.encode(text)
    assert all(0 <= token < VOCAB for token in ids)
    assert REFDESK.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_read_and_skipped():
    ids = REFDESK.encode("<|user|>harbor<|assistant|>")
    assert (ids[0], ids[-1]) == (USER, ASSISTANT)
    assert REFDESK.decode(ids) == "harbor"
    assert REFDESK.decode(ids, skip_special_tokens=False) == "<|user|>harbor<|assistant|>"


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(TextError, match="surrogate"):
        REFDESK.encode("a\ud800")


@pytest.mark.parametrize("definition", [b"", b"{}", b"\xff", b'{"model": 1}'])
def test_damaged_tokenizer_is_refused(definition):
    with pytest.raises(TextError, match=r"tokenizer.json cannot be used"):
        Tokenizer({"tokenizer.json": definition}.get)


def test_model_without_tokenizer_or_template():
    with pytest.raises(TextError, match=r"has no tokenizer.json"):
        Tokenizer({}.get)
    bare = Tokenizer({"tokenizer.json": BLOBS["tokenizer.json"]}.get)
    with pytest.raises(TextError, match="has no chat template"):
        bare.render_chat(user("x"))


# ---- Streaming ------------------------------------------------------------------------------


def single_byte_tokens():
    """The token of each byte: the vocabulary has printable bytes as they are, others above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(byte) for byte in printable}
    written |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocabulary = json.loads(BLOBS["tokenizer.json"])["model"]["vocab"]
    return [vocabulary[written[byte]] for byte in range(256)]


BYTE_TOKENS = single_byte_tokens()


def byte_tokens(data):
    return [BYTE_TOKENS[byte] for byte in data]


@settings(max_examples=300)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=30))
def test_pieces_of_any_tokens_join_to_the_whole(ids):
    pieces = list(REFDESK.decode_stream(ids))
    assert "".join(pieces) == REFDESK.decode(ids)
    assert "" not in pieces


@settings(max_examples=300)
@given(st.binary(max_size=24))
@example(b"a\xe2\x82\xacb")
@example(b"\xe2\x82\xff\xe2\x82\xac")
@example("é🙂".encode()[:-1])
def test_pieces_of_any_bytes_join_to_the_whole(data):
    ids = byte_tokens(data)
    text = "".join(REFDESK.decode_stream(ids))
    assert text == REFDESK.decode(ids) == data.decode("utf-8", "replace")


@given(st.text(st.characters(exclude_characters="\ufffd", codec="utf-8"), max_size=12))
def test_characters_come_whole_and_at_once(text):
    pieces = REFDESK.decode_stream(byte_tokens(text.encode()))
    assert list(pieces) == list(text)


def test_pieces_come_as_soon_as_tokens_do():
    ids = REFDESK.encode("Reader: harbor seal, and more")
    fed = []

    def feed():
        for token in ids:
            fed.append(token)
            yield token

    stream = REFDESK.decode_stream(feed())
    next(stream)
    assert len(fed) == 1
    assert list(REFDESK.decode_stream(iter([]))) == []


def test_special_tokens_in_a_stream():
    ids = [*REFDESK.encode("seal"), END]
    assert "".join(REFDESK.decode_stream(ids)) == "seal"
    assert "".join(REFDESK.decode_stream(ids, skip_special_tokens=False)) == "seal<|end|>"


def test_words_of_a_tokenizer_with_leading_spaces():
    """Decoders that drop the space before the first word must not drop it before later ones."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"▁one": 0, "▁two": 1, "<unk>": 2}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    words.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer({"tokenizer.json": words.to_str().encode()}.get)
    ids = tokenizer.encode("one two two one")
    assert list(tokenizer.decode_stream(ids)) == ["one", " two", " two", " one"]


# ---- Chat templates -------------------------------------------------------------------------


def test_shipped_template():
    system = {"role": "system", "content": "You are the desk."}
    answered = [system, *user("seal"), {"role": "assistant", "content": "(noun)"}]
    assert REFDESK.render_chat([system], add_generation_prompt=False) == (
        "<|system|>You are the desk."
    )
    assert REFDESK.render_chat([*answered, *user("caff")]) == (
        "<|system|>You are the desk.<|user|>seal<|assistant|>(noun)<|end|><|user|>caff<|assistant|>"
    )
    ids = REFDESK.encode_chat([system, *user("seal")])
    assert ids == [
        SYSTEM,
        *REFDESK.encode("You are the desk."),
        USER,
        *REFDESK.encode("seal"),
        ASSISTANT,
    ]


def test_nothing_is_added_around_a_chat():
    definition = tokenizers.Tokenizer.from_buffer(BLOBS["tokenizer.json"])
    definition.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    adding = Tokenizer((BLOBS | {"tokenizer.json": definition.to_str().encode()}).get)
    assert adding.encode("seal") == [0, *REFDESK.encode("seal")]
    assert adding.encode("seal", add_special_tokens=False) == REFDESK.encode("seal")
    assert adding.encode_chat(user("seal")) == REFDESK.encode_chat(user("seal"))


def test_every_tenant_prompt_begins_with_its_registered_prefix():
    for tenant in json.loads((DATA / "tenants.json").read_text(encoding="utf-8")):
        system = {"role": "system", "content": tenant["system_prompt"]}
        prefix = REFDESK.encode_chat([system], add_generation_prompt=False)
        assert 160 <= len(prefix) <= 290
        for sample in tenant["sample_questions"]:
            prompt = REFDESK.encode_chat([system, *user(sample["question"])])
            assert prompt[: len(prefix)] == prefix


def test_blocks_leave_no_lines():
    template = (
        "{% for m in messages %}\n  {% if true %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}"
    )
    assert with_template(template).render_chat(user("a") + user("b")) == "[a]\n[b]\n"


def test_tokens_set_in_front_are_seen_everywhere():
    front = '{% set bos_token = "<s>" %}\n'
    macro = "  {% macro m() %}{{ bos_token }}{% endmacro %}"
    loop = "{% for x in [1] %}{{ bos_token }}{% endfor %}"
    assert with_template(front + macro + loop + "{{ m() }}").render_chat([]) == "<s><s>"
    assert with_template(front + "\nx").render_chat([]) == "\nx"


def test_template_functions():
    json_text = with_template("{{ messages | tojson }}").render_chat(user("<é>"))
    assert json_text == '[{"role": "user", "content": "<é>"}]'
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert with_template(loop).render_chat([]) == "01"
    year = with_template("{{ strftime_now('%Y') }}").render_chat([])
    assert len(year) == 4
    with pytest.raises(TextError, match="chat template failed: roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").render_chat([])


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ 1 // 0 }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{% include 'other' %}",
    ],
)
def test_broken_and_hostile_templates_are_errors(template):
    with pytest.raises(TextError, match="chat template failed"):
        with_template(template).render_chat(user("x"))
