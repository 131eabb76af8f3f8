"""README.md says nothing that does not work: its code runs, its commands and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    """Returns the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands():
    """Returns the shell commands, one string for each `sh` block."""
    return blocks("sh")


def make_targets(block):
    return re.findall(r"^make (\S+)$", block, re.MULTILINE)


def without_make(block):
    return re.sub(r"^make .*\n", "", block, flags=re.MULTILINE)


def run(command, **options):
    """Runs a command in the checkout with this interpreter's environment first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_make_commands_are_run_by_ci():
    """They are not run here, since one of them runs this test."""
    targets = [target for block in commands() for target in make_targets(block)]
    assert targets[:2] == ["demo", "test"]
    steps = (ROOT / ".ci/run").read_text().splitlines()
    assert [target for target in targets if f"make {target}" not in steps] == []


@pytest.mark.parametrize("block", list(filter(None, map(without_make, commands()))))
def test_other_commands(block):
    (ROOT / "build").mkdir(exist_ok=True)
    assert run(["bash", "-euo", "pipefail", "-c", block])


@pytest.mark.parametrize("block", blocks("python"))
def test_python_code(block):
    assert run([sys.executable, "-W", "error", "-"], input=block)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_tree_names_what_exists():
    """The folder tree is a `text` block whose lines begin with a path."""
    (tree,) = blocks("text")
    paths = [line.split()[0] for line in tree.splitlines()]
    assert [path for path in paths if not (ROOT / path).exists()] == []
