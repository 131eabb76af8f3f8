"""The C ABI of the installed package: its symbols, its header, and what its files link to.

The exported names stand in four places: tinyloop.h, tinyloop.map, symbols.txt and the library.
A change of the ABI changes all four, and symbols.txt is where a review sees it.
"""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEADER = ROOT / "include/tinyloop.h"
PACKAGE = Path(importlib.util.find_spec("tinyloop_py").submodule_search_locations[0])
LIBRARY = PACKAGE / "lib/libtinyloop.so.0"

# The parts of the C library; on x86-64 the loader brings thread-local variables.
C_LIBRARY = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}

WARNINGS = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wundef"]
COMPILERS = [
    *(["gcc", "-xc", f"-std={std}", "-Wstrict-prototypes"] for std in ("c99", "c11", "c17", "c2x")),
    *(["gcc", "-xc", f"-std={std}", "-Wstrict-prototypes"] for std in ("gnu99", "gnu11", "gnu17")),
    *(["g++", "-xc++", f"-std={std}"] for std in ("c++98", "c++11", "c++17", "c++20")),
]


def run(*command, **options):
    """Returns the standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def header_names():
    declarations = re.findall(
        r"^TL_API\b[^;]*;", without_comments(HEADER.read_text()), re.MULTILINE
    )
    return sorted(re.search(r"\b(tl_\w+)\(", text)[1] for text in declarations)


def map_names():
    """Returns the names of the version script, each as "name@@NODE"."""
    text = without_comments((ROOT / "libtinyloop/tinyloop.map").read_text())
    nodes = re.findall(r"(\w+)\s*\{(.*?)\}", text, re.DOTALL)
    return sorted(
        f"{name}@@{node}" for node, body in nodes for name in re.findall(r"\btl_\w+(?=;)", body)
    )


def library_names():
    lines = run("nm", "-D", "--defined-only", "--with-symbol-versions", str(LIBRARY)).splitlines()
    # "A" marks the nodes of the version script.
    return sorted(name for _, kind, name in map(str.split, lines) if kind != "A")


def listed_names():
    return (HERE / "symbols.txt").read_text().split()


def dynamic_entries(path, tag):
    """Returns the values of a tag (such as NEEDED) in an ELF file's dynamic section."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "-dW", str(path)))


def test_library_exports_what_is_listed():
    assert library_names() == listed_names()


def test_version_script_names_what_is_listed():
    assert map_names() == listed_names()


def test_header_declares_what_is_listed():
    assert header_names() == [name.split("@@")[0] for name in listed_names()]


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda compiler: compiler[2][5:])
def test_header_compiles_alone_and_twice(compiler):
    source = '#include "tinyloop.h"\n#include "tinyloop.h"\n'
    run(*compiler, *WARNINGS, "-fsyntax-only", f"-I{PACKAGE / 'include'}", "-", input=source)


def test_header_macros_start_every_options_struct():
    text = without_comments(HEADER.read_text())
    structs = re.findall(r"\} (tl_\w+_options);", text)
    assert structs
    lines = "\n".join(
        f"extern const {name} check_{name};\nconst {name} check_{name} = {name.upper()}_INIT;"
        for name in structs
    )
    source = f'#include "tinyloop.h"\n{lines}\n'
    for compiler in COMPILERS:
        run(*compiler, *WARNINGS, "-fsyntax-only", f"-I{PACKAGE / 'include'}", "-", input=source)


def test_installed_header_is_the_source_header():
    assert (PACKAGE / "include/tinyloop.h").read_bytes() == HEADER.read_bytes()


def test_library_names_itself():
    assert dynamic_entries(LIBRARY, "SONAME") == ["libtinyloop.so.0"]


def test_library_needs_the_c_library_alone():
    assert set(dynamic_entries(LIBRARY, "NEEDED")) <= C_LIBRARY


def test_extensions_find_the_library_beside_them():
    extensions = list(PACKAGE.glob("*.abi3.so"))
    assert len(extensions) == 2
    for extension in extensions:
        assert "libtinyloop.so.0" in dynamic_entries(extension, "NEEDED")
        assert dynamic_entries(extension, "RUNPATH") == ["$ORIGIN/lib"]


def test_no_other_run_paths():
    files = [*PACKAGE.glob("*.so"), LIBRARY]
    assert [path for path in files if dynamic_entries(path, "RPATH")] == []
    assert dynamic_entries(LIBRARY, "RUNPATH") == []


def test_linker_script_stands_for_the_library():
    assert (PACKAGE / "lib/libtinyloop.so").read_text().endswith("INPUT(libtinyloop.so.0)\n")
