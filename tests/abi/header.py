"""Reads tinyloop.h.

The reader knows the few forms that the header's declarations and macros have and refuses any
other, so that nothing in the header goes past the tests that ask for everything in it.
"""

import re
from typing import NamedTuple


class Function(NamedTuple):
    result: str
    name: str
    parameters: list[tuple[str, str]]  # (type, name) of each


class Header(NamedTuple):
    version: tuple[int, int, int]
    functions: list[Function]
    structs: dict[str, list[tuple[str, str]]]  # (type, name) of each field
    constants: dict[str, int]
    callbacks: list[Function]
    scalars: dict[str, str]
    handles: list[str]


def read(text):
    """Returns the Header that ``text`` declares; ValueError where it is not understood."""
    text = without_comments(text).replace("\\\n", " ")
    for macro in re.findall(r"^#define (\w+)", text, re.MULTILINE):
        match(r"TINYLOOP_H|TL_API|TL_VERSION_(MAJOR|MINOR|PATCH)|TL_\w+_INIT", macro)
    header = Header(version(text), [], {}, {}, [], {}, [])
    for declaration in declarations(text):
        enter(declaration, header)
    return header


def without_comments(text):
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)


def version(text):
    parts = dict(re.findall(r"^#define TL_VERSION_(\w+) (\d+)$", text, re.MULTILINE))
    return tuple(int(parts[name]) for name in ("MAJOR", "MINOR", "PATCH"))


def declarations(text):
    """Yields each declaration on one line, without its semicolon."""
    only_cpp = re.compile(r"^#ifdef __cplusplus$.*?^#endif$", re.DOTALL | re.MULTILINE)
    text = only_cpp.sub("", text)
    text = " ".join(re.sub(r"^#.*$", "", text, flags=re.MULTILINE).split())
    while text:
        declaration, text = match(r"((?:\{[^{}]*\}|[^{};])*); ?(.*)", text)
        yield declaration


def enter(declaration, header):
    """Adds one declaration to ``header``."""
    if declaration.startswith("TL_API "):
        header.functions.append(function(r"TL_API (.*?)(\w+)\((.*)\)", declaration))
    elif "(*" in declaration:
        header.callbacks.append(function(r"typedef (.*?)\(\*(\w+)\)\((.*)\)", declaration))
    elif declaration.startswith("typedef struct ") and "{" in declaration:
        name, body = match(r"typedef struct (\w+) \{(.*;) \} \1", declaration)
        header.structs[name] = [variable(field) for field in body.split(";")[:-1]]
    elif declaration.startswith("typedef struct "):
        header.handles.extend(match(r"typedef struct (\w+) \1", declaration))
    elif declaration.startswith("enum "):
        (body,) = match(r"enum \{(.*)\}", declaration)
        for constant in body.split(","):
            name, value = match(r" (TL_\w+) = (\d+) ?", constant)
            header.constants[name] = int(value)
    else:
        kind, name = match(r"typedef (\w+) (\w+)", declaration)
        header.scalars[name] = kind


def function(form, declaration):
    result, name, inside = match(form, declaration)
    parameters = [] if inside == "void" else [variable(part) for part in inside.split(",")]
    return Function(result.strip(), name, parameters)


def variable(text):
    """Takes "const int32_t *tokens" apart: ("const int32_t *", "tokens")."""
    kind, name = match(r" ?((?:const )?\w+ \**)(\w+)", text)
    return kind.strip(), name


def match(form, text):
    """Returns the groups of a form that ``text`` must have."""
    found = re.fullmatch(form, text)
    if not found:
        raise ValueError(f"tinyloop.h has what tests/abi/header.py does not know: {text.strip()}")
    return found.groups()
