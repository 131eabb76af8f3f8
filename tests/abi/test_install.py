"""`make -C libtinyloop install`: the library for C programs, without Python."""

import os
import shlex

import gate
import pytest

import tinyloop_py as tl

ROOT = gate.HERE.parents[1]


@pytest.fixture
def no_python(tmp_path):
    """An environment in which every Python fails, and no outer make's flags go on."""
    folder = tmp_path / "no python"
    folder.mkdir()
    for name in ("python", "python3", "cython"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} was called' >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    return environment | {"PATH": f"{folder}:{environment['PATH']}"}


def make(environment, target, **variables):
    options = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "-C", ROOT / "libtinyloop", f"-j{len(os.sched_getaffinity(0))}"]
    gate.run(*command, target, *options, env=environment)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def built_and_run(folder, pkg_config_path, environment):
    """Builds quickstart.c as pkg-config says, and returns what it prints as it is."""
    environment = environment | {"PKG_CONFIG_PATH": str(pkg_config_path)}
    flags = gate.run("pkg-config", "--cflags", "--libs", "tinyloop", env=environment)
    source = ROOT / "examples/quickstart.c"
    gate.run("cc", "-std=c99", source, *shlex.split(flags), "-o", folder / "quickstart")
    return gate.run(folder / "quickstart", tl.default_model_path())


def test_install_and_uninstall(tmp_path, no_python):
    prefix = tmp_path / "with space & more" / "usr"
    make(no_python, "install", PREFIX=prefix)
    assert files(prefix) == [
        "include/tinyloop.h",
        "lib/libtinyloop.so",
        "lib/libtinyloop.so.0",
        "lib/pkgconfig/tinyloop.pc",
    ]
    assert (prefix / "lib/libtinyloop.so").readlink().name == "libtinyloop.so.0"
    gate.library_symbols(prefix / "lib/libtinyloop.so.0")
    moved = tmp_path / "elsewhere"
    prefix.rename(moved)
    printed = built_and_run(tmp_path, moved / "lib/pkgconfig", no_python)
    assert printed.startswith(f"tinyloop {tl.__version__}: ")
    make(no_python, "uninstall", PREFIX=moved)
    assert files(moved) == []


def test_install_for_a_package(tmp_path, no_python):
    """Below DESTDIR everything lies as it will lie, also where a system has folders of its own."""
    library = "/opt/tinyloop/lib/some&arch"
    make(
        no_python,
        "install",
        DESTDIR=tmp_path / "stage",
        PREFIX="/opt/tinyloop",
        LIBDIR=library,
        INCLUDEDIR="/opt/tinyloop/include/tinyloop",
    )
    stage = tmp_path / "stage/opt/tinyloop"
    assert files(stage) == [
        "include/tinyloop/tinyloop.h",
        "lib/some&arch/libtinyloop.so",
        "lib/some&arch/libtinyloop.so.0",
        "lib/some&arch/pkgconfig/tinyloop.pc",
    ]
    assert str(tmp_path) not in (stage / "lib/some&arch/pkgconfig/tinyloop.pc").read_text()
    assert built_and_run(tmp_path, stage / "lib/some&arch/pkgconfig", no_python)


def test_a_prefix_must_be_whole(no_python):
    with pytest.raises(AssertionError, match="PREFIX is usr; it must begin with /"):
        make(no_python, "install", PREFIX="usr")
