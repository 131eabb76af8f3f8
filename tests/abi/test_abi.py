"""The C ABI of the installed package: its symbols, its header, and what its files link to.

The exported names stand in five places: tinyloop.h, tinyloop.map, symbols.txt, pin.c and the
library. A change of the ABI changes all five; symbols.txt and pin.c are where a review sees it.
"""

import importlib.util
from pathlib import Path

import gate
import header
import pytest

ROOT = gate.HERE.parents[1]
INCLUDE = ROOT / "include"
HEADER = INCLUDE / "tinyloop.h"
PACKAGE = Path(importlib.util.find_spec("tinyloop_py").submodule_search_locations[0])
LIBRARY = PACKAGE / "lib/libtinyloop.so.0"


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


@pytest.mark.parametrize("compiler", gate.COMPILERS, ids=lambda compiler: compiler[2][5:])
def test_header_compiles_at_every_standard(compiler):
    gate.header_compiles(PACKAGE / "include", compiler)
    gate.macros_start_options(PACKAGE / "include", compiler)


def test_header_documents_everything():
    gate.header_is_documented(INCLUDE)


def test_structs_leave_no_padding():
    gate.no_struct_ends_in_padding(INCLUDE)


def test_installed_header_is_the_source_header():
    assert (PACKAGE / "include/tinyloop.h").read_bytes() == HEADER.read_bytes()


def test_what_the_library_links_to():
    gate.library_names_itself(LIBRARY)
    gate.library_needs_the_c_library_alone(LIBRARY)
    gate.no_run_path(LIBRARY)


def test_extensions_find_the_library_beside_them():
    extensions = list(PACKAGE.glob("*.abi3.so"))
    assert len(extensions) == 2
    for extension in extensions:
        assert "libtinyloop.so.0" in gate.dynamic_entries(extension, "NEEDED")
        assert gate.dynamic_entries(extension, "RUNPATH") == ["$ORIGIN/lib"]
        assert gate.dynamic_entries(extension, "RPATH") == []


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
