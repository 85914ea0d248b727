"""What a person sees: one line for bad input, a table, a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncache.cli import main

ROOT = Path(__file__).parents[2]
GOOD = '{"hash_ids": [1], "input_length": 5}\n'
BAD_LINES = {
    "nope": "not JSON: Expecting value",
    "[" * 100_000: "not JSON: maximum recursion depth",
    "[1]": "must be an object, not list",
    '{"hash_ids": 1, "input_length": 5}': "hash_ids must be a list of ints",
    '{"hash_ids": [true], "input_length": 5}': "hash_ids must be a list of ints",
    '{"hash_ids": [1]}': "input_length must be an int of at least 1, not None",
    '{"hash_ids": [1], "input_length": 0}': "at least 1, not 0",
    '{"hash_ids": [1], "input_length": true}': "at least 1, not True",
    '{"hash_ids": [1], "input_length": 513}': (
        "513 tokens are 2 blocks of 512, but hash_ids has 1"
    ),
    '{"hash_ids": [1], "input_length": 5, "timestamp": "now"}': (
        "timestamp must be a number, not 'now'"
    ),
    '{"hash_ids": [1], "input_length": 5, "timestamp": NaN}': (
        "timestamp must be finite, not nan"
    ),
}
BAD_ARGUMENTS = {
    "--page-tokens 0": "argument --page-tokens: '0' is not an int from 1 on",
    "--page-tokens 48": "--page-tokens must divide the trace's blocks of 512 tokens",
    "--device-pages 0": "argument --device-pages: '0' is not an int from 1 on",
    "--device-pages 5,,6": "argument --device-pages: '' is not an int from 1 on",
    "--device-pages 1e3": "argument --device-pages: '1e3' is not an int from 1 on",
    "--policy best": "argument --policy: invalid choice: 'best'",
    "--store redis": "'redis' is not none, memory or files:DIR",
    "--store files:": "'files:' is not none, memory or files:DIR",
    "--store files:/proc/x": "--store files:/proc/x: cannot keep pages in '/proc/x'",
    "--store files:x --device-pages 1,2": "takes one --device-pages, not 2",
    "--cancel-rate nan": "argument --cancel-rate: 'nan' is not a number from 0 to 1",
    "--cancel-rate 1.5": "argument --cancel-rate: '1.5' is not a number from 0 to 1",
    "--seed x": "argument --seed: invalid int value: 'x'",
    "--plot a.png": "--plot needs several --device-pages",
    "--plot a.txt --device-pages 1,2": "must end in one of .png",
    "--plot /no/a.png --device-pages 1,2": "--plot /no/a.png: no such directory",
}


@pytest.fixture
def refused(capsys):
    """Return a function that runs a command and returns the line that refused it."""

    def run(*words: object) -> str:
        try:
            code = main(list(map(str, words)))
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("asyncache")
        assert err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_refused_with_its_place(tmp_path, refused, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    error = refused("replay", path)
    assert f"error: {path}:3: " in error
    assert BAD_LINES[line] in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (rb'{"input": "\ud800"}', "input is not UTF-8: surrogates not allowed"),
        (b'{"input": "\xff"}', "not JSON: 'utf-8' codec can't decode"),
        (b'{"input": 5}', "neither hash_ids nor an input that is text"),
    ],
)
def test_a_bad_text_is_refused_with_its_place(tmp_path, refused, content, message):
    (tmp_path / "trace.jsonl").write_bytes(content)
    error = refused("replay", tmp_path)
    assert f"{tmp_path / 'trace.jsonl'}:1: {message}" in error


@pytest.mark.parametrize("words", BAD_ARGUMENTS)
def test_a_bad_argument_is_refused(traces, refused, words):
    path = traces / "synthetic.jsonl"
    assert BAD_ARGUMENTS[words] in refused("replay", path, *words.split())


def test_a_trace_that_holds_nothing_is_refused(tmp_path, refused):
    assert "holds no *.jsonl" in refused("replay", tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds no requests" in refused("replay", tmp_path)
    assert "No such file" in refused("replay", tmp_path / "absent")


def test_a_command_is_needed(refused):
    assert "arguments are required: COMMAND" in refused()
    assert "invalid choice: 'play'" in refused("play")
    assert "arguments are required: trace" in refused("replay")


def test_a_table_has_a_line_for_each_capacity(traces, capsys):
    path = traces / "synthetic.jsonl"
    assert main(["replay", str(path), "--device-pages", "10,inf"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0].endswith("300 requests, 7352 distinct pages of 512 tokens")
    assert lines[1] == "policy lru, store none, 300 served, 0 cancelled"
    assert lines[3].split()[:3] == ["device", "pages", "hit"]
    assert lines[4].split()[0] == "10"
    assert " ".join(lines[5].split()).startswith("inf 7352 369/7721 = 0.047792")
    assert lines[6].endswith(
        "longer than the device: only their first pages were served"
    )


def test_a_table_tells_the_store_from_the_device(traces, capsys):
    words = ["replay", str(traces / "taubench"), "--store", "memory"]
    assert main([*words, "--device-pages", "40"]) == 0
    out, _ = capsys.readouterr()
    assert "from device  from store  stored" in out


def test_the_same_capacity_is_replayed_once(traces, replay):
    path = traces / "taubench"
    runs = replay(path, "--device-pages", "7,7,inf", "--device-pages", "inf")["runs"]
    assert len(runs) == 2


def test_a_plot_is_drawn(tmp_path, traces, replay):
    pytest.importorskip("matplotlib")
    path = tmp_path / "hits.png"
    replay(traces / "taubench", "--device-pages", "5,50,inf", "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_told(tmp_path, traces, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "hits.png").mkdir()
    words = ["replay", str(traces / "taubench"), "--device-pages", "5,50", "--plot"]
    assert main([*words, str(tmp_path / "hits.png")]) == 2
    assert f"--plot {tmp_path / 'hits.png'}: " in capsys.readouterr().err


def test_a_bar_is_drawn_on_a_terminal_only(traces, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["replay", str(traces / "taubench"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "pages" in err
    assert json.loads(out)["format"] == "text"


def test_a_bar_is_not_missed_without_rich(traces, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["replay", str(traces / "taubench")]) == 0
    assert capsys.readouterr().err == ""


def test_it_runs_as_a_module_and_without_torch(traces):
    code = """
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "anyio", "matplotlib"]))
runpy.run_module("asyncache", run_name="__main__")
"""
    command = [sys.executable, "-W", "error", "-c", code, "replay"]
    done = subprocess.run(
        [*command, str(traces / "taubench"), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["format"] == "text"
