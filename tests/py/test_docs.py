"""The code of docs/*.md runs as it stands there, and the links of its pages lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

import tinyloop_py as tl

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def code_blocks(page, language="python"):
    """Returns (line before the code, code) of each block of that language."""
    text = page.read_text("utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


WITH_CODE = [page for page in PAGES if code_blocks(page)]


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


def test_c_code(tmp_path):
    """Each C block is a program that takes a model's path and prints something."""
    package = Path(tl.__file__).parent
    library = package / "lib"
    link = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltinyloop"]
    blocks = [code for page in PAGES for _, code in code_blocks(page, "c")]
    assert blocks
    for code in blocks:
        (tmp_path / "page.c").write_text(code)
        strict = ["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
        files = [f"-I{package / 'include'}", "page.c", "-o", "page"]
        subprocess.run([*strict, *files, *link], cwd=tmp_path, check=True)
        command = [tmp_path / "page", tl.default_model_path()]
        assert subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
