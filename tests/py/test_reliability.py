"""docs/reliability.md names tests that exist, and every test that was written for it."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs/reliability.md").read_text("utf-8")
NAMED = re.findall(r"`(test_\w+\.(?:c|py))::(\w+)`", PAGE)


def names_in(name):
    """Returns the names of a file's tests."""
    if name.endswith(".c"):
        return re.findall(r"^TEST\((\w+)\)", (TESTS / "c" / name).read_text(), re.MULTILINE)
    return re.findall(r"^def (test_\w+)\(", (TESTS / "py" / name).read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", sorted({name for name, _ in NAMED}))
def test_named_tests_exist(name):
    assert {test for file, test in NAMED if file == name} <= set(names_in(name))


@pytest.mark.parametrize(
    "name",
    [
        "test_dropped_streams.py",
        "test_known_faults.c",
        "test_known_faults.py",
        "test_pool_tables.c",
        "test_threads.py",
    ],
)
def test_what_was_written_for_the_page_is_named(name):
    assert {test for file, test in NAMED if file == name} == set(names_in(name))


def test_every_row_names_a_test():
    rows = re.findall(r"^\| (?!fault \||---)(.*) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 30
    assert [fault for fault, named in rows if "::" not in named] == []
