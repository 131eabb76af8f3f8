"""The `tinyloop` command: what it prints, its exit statuses, its one-line errors, and the demo."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import DATA, LLAMA, random_tensors, save_checkpoint

import tinyloop_py as tl
from tinyloop_py import cli, demo, linking
from tinyloop_py import format as fmt
from tinyloop_py.text import Tokenizer

# -P: the installed package, not the folder of that name in a checkout.
COMMAND = [sys.executable, "-P", "-m", "tinyloop_py"]
MODEL = Path(tl.default_model_path())
GREEDY = ["--temperature", "0"]


class Proxy:
    """A model that tests change one method of; the rest is the real one's."""

    _real = tl.Model

    def __init__(self, path, max_seq_len=2048, **options):
        self.real = self._real(path, max_seq_len, **options)

    def __enter__(self):
        self.real.__enter__()
        return self

    def __exit__(self, *error):
        return self.real.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.real, name)


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, "timeout": 300} | options
    return subprocess.run([*COMMAND, *map(str, arguments)], check=False, **options)


def error_line(result, status=1):
    """The only line on stderr of a command that failed; nothing was printed."""
    assert result.returncode == status
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("tinyloop: error: ")
    return line


@pytest.fixture
def call(capsys):
    """Runs the command in this process: status, stdout, stderr."""

    def run_main(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run_main


# ---- Usage ----------------------------------------------------------------------------------


def test_help_names_every_command():
    result = run("--help")
    assert result.returncode == 0
    for command in ("demo", "generate", "convert", "inspect", "info"):
        assert re.search(rf"^ +{command} ", result.stdout, re.MULTILINE)
        assert run(command, "--help").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve"],
        ["generate"],
        ["generate", "--max-tokens", "many", "x"],
        ["convert", "x"],
        ["convert", "--dtype", "int8", "x", "y"],
        ["inspect"],
        ["inspect", "--unknown", "x"],
        ["--cflags", "info"],
    ],
)
def test_wrong_usage_is_status_2(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("usage: tinyloop")


# ---- What C programs are built with ---------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--version"], [tl.__version__]),
        (["--pkgconfigdir"], [f"{tl.get_library_dir()}/pkgconfig"]),
        (["--cflags"], [linking.cflags()]),
        (["--libs"], [linking.libs()]),
        (["--libs", "--cflags"], [f"{linking.cflags()} {linking.libs()}"]),
        (["--cflags", "--version"], [tl.__version__, linking.cflags()]),
    ],
    ids=" ".join,
)
def test_options_for_c_programs(call, arguments, lines):
    status, out, err = call(*arguments)
    assert (status, out.splitlines(), err) == (0, lines, "")


def test_options_for_c_programs_are_quoted_for_a_shell(call, monkeypatch):
    monkeypatch.setattr(linking, "_PACKAGE", Path("/a place/it's"))
    _, out, _ = call("--cflags", "--libs")
    assert shlex.split(out) == [
        "-I/a place/it's/include",
        "-L/a place/it's/lib",
        "-Wl,-rpath,/a place/it's/lib",
        "-ltinyloop",
    ]


# ---- info, inspect, convert -----------------------------------------------------------------


def test_info(call):
    status, out, err = call("info")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["tinyloop"] == [tl.__version__]
    assert rows.keys() == {"tinyloop", *tl.build_info()}


def test_inspect(call):
    status, out, err = call("inspect", MODEL)
    assert (status, err) == (0, "")
    assert re.search(r"^parameters +11,014,656 ", out, re.MULTILINE)
    assert "layers.0.attn.q.weight" not in out
    status, out, err = call("inspect", "--tensors", "--verify", MODEL)
    assert (status, err) == (0, "")
    assert re.search(r"^layers.4.mlp.down.weight +bfloat16 \[384, 1024\]", out, re.MULTILINE)
    assert out.splitlines()[-1].startswith("verified: ")


def test_inspect_of_damaged_files(call, tmp_path):
    damaged = bytearray(MODEL.read_bytes())
    damaged[fmt.read_file(MODEL).tensors["layers.3.attn.v.weight"].offset] ^= 1
    path = tmp_path / "damaged.tinyloop"
    path.write_bytes(damaged)
    assert call("inspect", path)[0] == 0
    status, out, err = call("inspect", "--verify", path)
    assert status == 1
    assert err == ("tinyloop: error: layers.3.attn.v.weight: its bytes do not match its checksum\n")
    assert out.splitlines()[-1] == "verified: damaged"
    path.write_bytes(damaged[:-1])
    assert "its header says" in error_line(run("inspect", path))
    assert "No such file" in error_line(run("inspect", tmp_path / "none"))


def test_inspect_of_a_file_that_is_cut_meanwhile(call, tmp_path, monkeypatch):
    path = tmp_path / "cut.tinyloop"
    path.write_bytes(MODEL.read_bytes())
    size = MODEL.stat().st_size

    def cut(file, tensors):
        os.truncate(path, size // 2)
        return ""

    monkeypatch.setattr("tinyloop_py.describe.describe", cut)
    status, _, err = call("inspect", "--verify", path)
    assert status == 1
    assert err == (
        f"tinyloop: error: {path}: {size // 2} bytes; it had {size} when it was opened. "
        "Read it again once it is whole\n"
    )


def test_convert(call, tmp_path):
    out_path = tmp_path / "llama.tinyloop"
    status, out, err = call("convert", DATA / "llama", out_path, "--dtype", "bf16")
    assert (status, err) == (0, "")
    assert "llama" in out
    assert "bfloat16" in out
    assert {t.dtype for t in fmt.read_file(out_path).tensors.values()} == {"bfloat16"}


def test_convert_reports_unknown_keys_and_skipped_tensors(call, tmp_path):
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = random_tensors(LLAMA)
    tensors[buffer] = tensors["model.norm.weight"]
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA | {"new_key": 1}, tensors)
    status, out, err = call("convert", folder, tmp_path / "x.tinyloop")
    assert status == 0
    assert err.splitlines() == ["tinyloop: warning: config.json: unknown key new_key was ignored"]
    assert f"not needed: tensor {buffer}" in out


def test_convert_shows_progress_on_a_terminal(call, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, _, err = call("convert", DATA / "llama", tmp_path / "x.tinyloop")
    assert status == 0
    assert err.endswith("100% layers.3.mlp.down.weight\n")


def test_convert_errors_are_one_line(tmp_path):
    config = LLAMA | {"hidden_act": "gelu"}
    folder = save_checkpoint(tmp_path / "checkpoint", config, random_tensors(config))
    result = run("convert", folder, tmp_path / "x.tinyloop")
    assert "hidden_act is 'gelu'" in error_line(result)
    assert "does not exist" in error_line(run("convert", DATA / "llama", tmp_path / "no" / "x"))
    assert not list(tmp_path.glob("*.tinyloop*"))


# ---- generate -------------------------------------------------------------------------------


def expected_text(ids, max_tokens, **options):
    with tl.Model(MODEL) as model:
        tokens = list(model.generate_stream(ids, max_tokens, **options))
        return Tokenizer(model.blob).decode(tokens) + "\n"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(fmt.read_file(MODEL).blobs.get)


def test_generate_continues_the_prompt(call, tokenizer):
    prompt = "You are the Lexicon desk."
    status, out, err = call("generate", *GREEDY, "--max-tokens", 12, prompt)
    assert (status, err) == (0, "")
    assert out == expected_text(tokenizer.encode(prompt), 12, temperature=0.0)


def test_generate_chat(call, tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "seal"}]
    with_system = tokenizer.encode_chat(messages)
    arguments = [*GREEDY, "--max-tokens", "8", "seal"]
    assert call("generate", "--system", "Be brief.", *arguments)[1] == expected_text(
        with_system, 8, temperature=0.0
    )
    assert call("generate", "--chat", *arguments)[1] == expected_text(
        tokenizer.encode_chat(messages[1:]), 8, temperature=0.0
    )


def test_generate_passes_every_option(monkeypatch, call):
    seen = {}

    class Model(Proxy):
        def __init__(self, path, max_seq_len=2048, **options):
            seen["model"] = (Path(path), max_seq_len, options)
            super().__init__(path, max_seq_len)

        def generate_stream(self, prompt, max_tokens=128, **options):
            seen["generate"] = (max_tokens, options)
            return iter(list(prompt))

    monkeypatch.setattr(tl, "Model", Model)
    status, out, _ = call(
        "generate",
        *("--model", MODEL, "--max-tokens", 3, "--max-seq-len", 77, "--loops", 5),
        *("--temperature", 0.5, "--top-k", 6, "--top-p", 0.75, "--min-p", 0.125),
        *("--repetition-penalty", 1.5, "--seed", 9, "--cache-window", 11),
        *("--kv-mode", "fp32", "--threads", 2, "echo"),
    )
    assert (status, out) == (0, "echo\n")
    assert seen == {
        "model": (MODEL, 77, {"kv_mode": "fp32", "threads": 2}),
        "generate": (
            3,
            {
                "loops": 5,
                "temperature": 0.5,
                "top_k": 6,
                "cache_window": 11,
                "top_p": 0.75,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "seed": 9,
            },
        ),
    }


def test_generate_reads_standard_input(call, monkeypatch, tokenizer):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Reader: caff\n"))
    status, out, _ = call("generate", *GREEDY, "--max-tokens", 4, "-")
    assert status == 0
    assert out == expected_text(tokenizer.encode("Reader: caff"), 4, temperature=0.0)


def test_warnings_are_one_line():
    result = run("generate", *GREEDY, "--loops", 13, "--max-tokens", 1, "caff")
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("tinyloop: warning: ")


def test_generate_errors_are_one_line(tmp_path):
    error_line(run("generate", "--model", tmp_path / "none.tinyloop", "x"))
    too_long = error_line(run("generate", "--max-tokens", 100, "--max-seq-len", 64, "x"))
    assert "100" in too_long
    assert "64" in too_long
    config = LLAMA | {"max_position_embeddings": 2048}
    folder = save_checkpoint(tmp_path / "checkpoint", config, random_tensors(config))
    assert run("convert", folder, tmp_path / "x.tinyloop").returncode == 0
    line = error_line(run("generate", "--model", tmp_path / "x.tinyloop", "x"))
    assert "tokenizer.json" in line


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (tl.Error("one\n  two"), 1, "tinyloop: error: one two\n"),
        (MemoryError(), 1, "tinyloop: error: MemoryError\n"),
        (OSError(5, "Input/output error"), 1, "tinyloop: error: [Errno 5] Input/output error\n"),
    ],
)
def test_failures_while_generating(monkeypatch, call, error, status, message):
    class Model(Proxy):
        def generate_stream(self, prompt, max_tokens=128, **options):
            yield prompt[0]
            raise error

    monkeypatch.setattr(tl, "Model", Model)
    assert call("generate", "a word") == (status, "a", message)


@pytest.mark.parametrize("arguments", [["inspect", "--tensors", MODEL], ["generate", "x"]])
def test_closed_pipe_is_quiet(arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = run(*arguments, capture_output=False, stdout=write_end, stderr=subprocess.PIPE)
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")


# ---- demo -----------------------------------------------------------------------------------

TENANTS = json.loads((Path(fmt.__file__).parent / "data/tenants.json").read_text("utf-8"))


def table_rows(out):
    """The table's cells by tenant; it is the last thing in the output."""
    lines = out.splitlines()[-len(TENANTS) :]
    header = out.splitlines()[-len(TENANTS) - 1]
    assert header.split()[0] == "tenant"
    assert header.split()[-1] == "identical"
    return {line.split()[0]: line.split()[1:] for line in lines}


def prompt_and_prefix(tokenizer, tenant, question):
    system = {"role": "system", "content": tenant["system_prompt"]}
    prompt = tokenizer.encode_chat([system, {"role": "user", "content": question}])
    return len(prompt), len(tokenizer.encode_chat([system], add_generation_prompt=False))


def test_demo_ends_with_its_table(tokenizer):
    result = run("demo", "--max-tokens", 3)
    assert (result.returncode, result.stderr) == (0, "")
    rows = table_rows(result.stdout)
    assert list(rows) == [tenant["name"] for tenant in TENANTS]
    for tenant in TENANTS:
        prompt_tokens, reused, without_ms, with_ms, ratio, identical = rows[tenant["name"]]
        question = tenant["sample_questions"][0]["question"]
        expected = prompt_and_prefix(tokenizer, tenant, question)
        assert (int(prompt_tokens), int(reused)) == expected
        assert float(without_ms) > 0
        assert float(with_ms) > 0
        assert float(ratio) > 0
        assert identical == "yes"
        assert f"{tenant['name']}: {question}\n" in result.stdout
    assert result.stdout.count("  without pool: ") == result.stdout.count("  with pool: ") == 16


def only(monkeypatch, tmp_path, n_tenants):
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps(TENANTS[:n_tenants]), encoding="utf-8")
    monkeypatch.setattr(demo, "_TENANTS", path)


def test_demo_adds_up_several_questions(monkeypatch, tmp_path, call, tokenizer):
    only(monkeypatch, tmp_path, 1)
    status, out, _ = call("demo", "--questions", 2, "--max-tokens", 1)
    assert status == 0
    cells = out.splitlines()[-1].split()
    counts = [
        prompt_and_prefix(tokenizer, TENANTS[0], sample["question"])
        for sample in TENANTS[0]["sample_questions"][:2]
    ]
    assert [int(cells[1]), int(cells[2])] == [sum(column) for column in zip(*counts, strict=True)]


def test_demo_says_no_where_the_pool_changes_tokens_or_saves_nothing(monkeypatch, tmp_path, call):
    class Model(Proxy):
        def generate_stream(self, prompt, max_tokens=128, *, pool=None, **options):
            tokens = list(self.real.generate_stream(prompt, max_tokens, **options))
            return iter(tokens if pool is None else [*tokens[:-1], tokens[-1] ^ 1])

    only(monkeypatch, tmp_path, 2)
    monkeypatch.setattr(tl, "Model", Model)
    status, out, err = call("demo", "--max-tokens", 2)
    assert (status, err) == (1, "")
    for line in out.splitlines()[-2:]:
        cells = line.split()
        assert (cells[2], cells[-1]) == ("0", "no")


def test_demo_refuses_counts_that_ask_for_nothing(call):
    status, out, err = call("demo", "--questions", 0)
    assert (status, out) == (1, "")
    assert "questions is 0" in err
