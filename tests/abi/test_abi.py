"""The C ABI of the installed package: its symbols, its header, and what its files link to.

The exported names stand in five places: tinyloop.h, tinyloop.map, symbols.txt, pin.c and the
library. A change of the ABI changes all five; symbols.txt and pin.c are where a review sees it.
"""

import importlib.util
import re
from pathlib import Path

import gate
import header
import pytest

ROOT = gate.HERE.parents[1]
INCLUDE = ROOT / "include"
HEADER = INCLUDE / "tinyloop.h"
PACKAGE = Path(importlib.util.find_spec("tinyloop_py").submodule_search_locations[0])
LIBRARY = PACKAGE / "lib/libtinyloop.so.0"

# The parts of the C library; on x86-64 the loader brings thread-local variables.
C_LIBRARY = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}

WARNINGS = ["-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wundef"]
C_STANDARDS = ("c99", "c11", "c17", "c2x", "gnu99", "gnu11", "gnu17", "gnu2x")
CPP_STANDARDS = ("c++98", "c++11", "c++14", "c++17", "c++20")
COMPILERS = [
    *(["gcc", "-xc", f"-std={std}", "-Wstrict-prototypes"] for std in C_STANDARDS),
    *(["g++", "-xc++", f"-std={std}"] for std in CPP_STANDARDS),
]


def dynamic_entries(path, tag):
    """Returns the values of a tag (such as NEEDED) in an ELF file's dynamic section."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", gate.run("readelf", "-dW", path))


def test_library_exports_what_is_listed():
    gate.library_symbols(LIBRARY)


def test_version_script_names_what_is_listed():
    gate.map_symbols(ROOT / "libtinyloop/tinyloop.map")


def test_header_declares_what_is_listed():
    gate.header_symbols(INCLUDE)


def test_everything_in_the_header_is_pinned():
    gate.pin_is_complete(INCLUDE)


def test_types_and_numbers_are_the_pinned_ones():
    gate.pin_compiles(INCLUDE)


def test_library_has_what_is_pinned():
    gate.pin_links(INCLUDE, LIBRARY)


def test_programs_built_against_the_baseline_still_run():
    gate.abidiff(INCLUDE, LIBRARY)


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda compiler: compiler[2][5:])
def test_header_compiles_alone_and_twice(compiler):
    source = '#include "tinyloop.h"\n#include "tinyloop.h"\n'
    gate.run(*compiler, *WARNINGS, "-fsyntax-only", f"-I{PACKAGE / 'include'}", "-", input=source)


def test_header_macros_start_every_options_struct():
    structs = [name for name in gate.read_header(INCLUDE).structs if name.endswith("_options")]
    assert structs
    lines = "\n".join(
        f"extern const {name} check_{name};\nconst {name} check_{name} = {name.upper()}_INIT;"
        for name in structs
    )
    source = f'#include "tinyloop.h"\n{lines}\n'
    for compiler in COMPILERS:
        gate.run(
            *compiler, *WARNINGS, "-fsyntax-only", f"-I{PACKAGE / 'include'}", "-", input=source
        )


def test_header_documents_everything():
    lines = HEADER.read_text().splitlines()
    declared = [n for n, line in enumerate(lines) if re.match(r"(TL_API|typedef|enum)\b", line)]
    assert len(declared) > len(gate.listed())
    assert [lines[n] for n in declared if not lines[n - 1].endswith("*/")] == []


def test_no_struct_ends_in_padding():
    """An older program's padding is not zero, so no later version's field may take its place."""
    lines = [
        f"_Static_assert(offsetof({struct}, {fields[-1][1]}) + sizeof((({struct} *)0)->"
        f'{fields[-1][1]}) == sizeof({struct}), "{struct} ends in padding");'
        for struct, fields in gate.read_header(INCLUDE).structs.items()
    ]
    source = "\n".join(['#include "tinyloop.h"', *lines, ""])
    gate.run(*gate.PIN_COMPILER, "-fsyntax-only", f"-I{INCLUDE}", "-xc", "-", input=source)


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


@pytest.mark.parametrize(
    "text",
    [
        "TL_API extern int32_t tl_total;",
        "TL_API void tl_print(const char *format, ...);",
        "TL_API void tl_forget(tl_model *);",
        "typedef struct tl_pair { int32_t a, b; } tl_pair;",
        "typedef struct tl_list { int32_t ids[4]; } tl_list;",
        "typedef struct tl_flags { uint32_t dry : 1; } tl_flags;",
        "typedef enum tl_color { TL_COLOR_RED = 0 } tl_color;",
        "enum { TL_COLOR_RED, TL_COLOR_BLUE };",
        "union tl_number { int32_t i; float f; };",
        "#define TL_COLOR_RED 0",
    ],
)
def test_reader_refuses_what_it_does_not_know(text):
    with pytest.raises(ValueError, match="does not know"):
        header.read(f"{HEADER.read_text()}\n{text}\n")
