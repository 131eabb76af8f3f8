"""Keys, the reader of config.json: any value is checked, and no key is passed over in silence."""

import functools

import pytest
from checkpoints import golden_checkpoint
from family_models import FAMILIES as DATA_FAMILIES
from hypothesis import given
from hypothesis import strategies as st

from tinyloop_py.convert import CheckpointError
from tinyloop_py.families import Keys, read_layout

golden = functools.cache(golden_checkpoint)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(value=VALUES)
def test_a_value_is_right_or_refused_by_name(value):
    checks = {
        "integer": lambda keys: keys.integer("a", low=-(2**63)),
        "positive": lambda keys: keys.positive("a"),
        "flag": lambda keys: keys.flag("a"),
        "mapping": lambda keys: keys.mapping("a"),
    }
    right = {
        "integer": type(value) is int and -(2**63) <= value < 2**63,
        "positive": type(value) in (int, float) and 0 < value < float("inf"),
        "flag": type(value) is bool,
        "mapping": value is None or isinstance(value, dict),
    }
    for kind, check in checks.items():
        keys = Keys({"a": value})
        if right[kind]:
            check(keys)
            continue
        with pytest.raises(CheckpointError) as caught:
            check(keys)
        assert "config.json has no a" if value is None else "config.json: a is" in str(caught.value)


@given(values=st.dictionaries(st.text(max_size=4), VALUES, max_size=6), read=st.sets(st.text()))
def test_unread_keys_are_those_that_nobody_asked_for(values, read):
    keys = Keys(values)
    for key in read:
        keys.get(key, None)
    present = {key for key, value in values.items() if value is not None}
    assert keys.unread() == sorted(present - read)


@given(values=st.dictionaries(st.text(max_size=4), VALUES, max_size=6))
def test_unread_nested_keys_have_the_outer_name(values):
    keys = Keys({"outer": values})
    nested = keys.mapping("outer")
    assert nested is keys.mapping("outer")
    left = [f"outer.{key}" for key, value in values.items() if value is not None]
    assert keys.unread() == sorted(left)


@pytest.mark.parametrize("family", [name for name in DATA_FAMILIES if "sharded" not in name])
@given(data=st.data())
def test_no_config_breaks_a_family(family, data):
    """Whatever stands in the place of some values, it is understood or refused by name."""
    config, tensors = golden(family)
    keys = data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3))
    values = VALUES | st.integers(-1, 300) | st.sampled_from(list(config.values()))
    changes = {key: data.draw(values) for key in keys}
    try:
        read_layout(config | changes, tensors)
    except CheckpointError as error:
        named = [key for key in (*keys, "head_dim") if key in str(error)]
        assert named or "config.json" in str(error), str(error)  # noqa: PT017
