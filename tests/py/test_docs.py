"""The code of docs/*.md runs as it stands there, and the links of its pages lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tinyloop_py as tl
from tinyloop_py import linking

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def code_blocks(page, language="python"):
    """Returns (line before the code, code) of each block of that language."""
    text = page.read_text("utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


WITH_CODE = [page for page in PAGES if code_blocks(page)]
WITH_C_CODE = [page for page in PAGES if code_blocks(page, "c")]


def anchors(page):
    """Returns what can follow a # in links to the page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def links(page):
    """Returns (path, anchor) of each link to a file; the path is empty for the page itself."""
    found = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text("utf-8"))
    assert all(path or anchor for path, anchor in found)
    return found


def test_pages_with_code():
    names = {page.name for page in WITH_CODE}
    assert names >= {"generation.md", "prefix-cache.md", "prefix-pool.md"}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code(page):
    """Blocks share one namespace. A failure's traceback shows the page's own lines."""
    namespace = {"__name__": page.stem}
    for line, code in code_blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def c_program(page):
    return "\n".join(code for _, code in code_blocks(page, "c"))


@pytest.mark.parametrize("page", WITH_C_CODE, ids=lambda page: page.name)
def test_c_code(page, tmp_path):
    """The C blocks of a page are one program that takes a model's path and prints something."""
    (tmp_path / "page.c").write_text(c_program(page))
    strict = ["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    flags = shlex.split(f"{linking.cflags()} page.c -o page {linking.libs()}")
    subprocess.run([*strict, *flags], cwd=tmp_path, check=True)
    command = [tmp_path / "page", tl.default_model_path()]
    assert subprocess.run(command, check=True, capture_output=True).stdout


def test_the_c_page_is_the_example():
    assert c_program(DOCS / "c.md") == (DOCS.parent / "examples/quickstart.c").read_text("utf-8")


def test_the_c_pages_commands():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (DOCS.parent / "build").mkdir(exist_ok=True)
    for _, code in code_blocks(DOCS / "c.md", "sh"):
        command = ["bash", "-euo", "pipefail", "-c", code]
        subprocess.run(command, cwd=DOCS.parent, env=os.environ | {"PATH": path}, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
