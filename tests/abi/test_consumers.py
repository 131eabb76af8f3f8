"""The examples, built as their users would with what the installed package says of itself."""

import os
import shlex
import subprocess
from pathlib import Path

import gate
import pytest

import tinyloop_py as tl

EXAMPLES = gate.HERE.parents[1] / "examples"
PKG_CONFIG_PATH = Path(tl.__file__).parent / "lib/pkgconfig"
STRICT = ["-pedantic-errors", "-Wall", "-Wextra", "-Werror"]
COMPILERS = {"quickstart.c": "gcc", "quickstart.cpp": "g++"}
STANDARDS = {"quickstart.c": ["c99", "c17"], "quickstart.cpp": ["c++11", "c++17", "c++20"]}


def pkg_config():
    environment = os.environ | {"PKG_CONFIG_PATH": str(PKG_CONFIG_PATH)}
    return shlex.split(gate.run("pkg-config", "--cflags", "--libs", "tinyloop", env=environment))


def build(folder, source, standard):
    program = folder / source.replace(".", "_")
    command = [COMPILERS[source], f"-std={standard}", *STRICT, EXAMPLES / source, *pkg_config()]
    gate.run(*command, "-o", program)
    return program


@pytest.fixture
def examples(tmp_path):
    """Each example as a program, at the oldest standard that it is for."""
    return {source: build(tmp_path, source, STANDARDS[source][0]) for source in STANDARDS}


@pytest.mark.parametrize("source", STANDARDS)
def test_newer_standards(tmp_path, source):
    for standard in STANDARDS[source][1:]:
        build(tmp_path, source, standard)


def test_the_same_story(examples):
    """By callback in C, by stream in C++: the same tokens, of which only the question was run."""
    c = gate.run(examples["quickstart.c"], tl.default_model_path()).splitlines()
    cpp = gate.run(examples["quickstart.cpp"], tl.default_model_path())
    tokens, counters = cpp.splitlines()
    first = next(line for line in c if line.startswith("tokens:"))
    assert tokens == first.partition("  (")[0]
    n = len(tokens.split()) - 1
    assert n > 1
    assert counters == (
        f"{64 + 5} tokens prefilled, {n - 1} decoded; pool: 0 full, 1 partial, 0 missed"
    )


def test_what_went_wrong_is_said(examples):
    for program in examples.values():
        missing = subprocess.run([program, "no/such.tinyloop"], capture_output=True, text=True)
        assert missing.returncode == 1
        assert "tl_model_load: " in missing.stderr
        assert "no/such.tinyloop" in missing.stderr
        assert subprocess.run([program], capture_output=True).returncode == 2
