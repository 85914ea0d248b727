"""``python -m examples.serve`` as its users run it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.serve.__main__ import _parser
from tests.serve.scene import PROMPT, ask, completed, streamed

ROOT = Path(__file__).parents[2]


@contextmanager
def process(directory: Path):
    """Run a server on a free port; yield it and the port."""
    command = [sys.executable, "-m", "examples.serve", "--tiny", "--port", "0"]
    with subprocess.Popen(
        [*command, "--store", str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            url = next(
                word
                for line in server.stdout
                for word in line.split()
                if word.startswith("http://") and word.endswith("/v1/completions")
            )
            yield server, int(url.split(":")[2].split("/")[0])
        finally:
            server.kill()


@pytest.mark.slow
async def test_a_restart_finds_what_a_signal_let_it_save(tmp_path):
    with process(tmp_path) as (server, port):
        client = await ask(port, stream=True, max_tokens=100)
        await client.reader.readuntil(b"data: ")
        server.send_signal(signal.SIGINT)
        rest = await client.reader.read()
        client.close()
        # Under way when the signal came, it was answered to its end.
        assert rest.rstrip(b"\r\n0").endswith(b"[DONE]")
        assert server.wait(timeout=20) == 0
    with process(tmp_path) as (server, port):
        status, answer = await completed(port, max_tokens=5)
        assert status == 200
        num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert num_cached == (len(PROMPT) - 1) // 16 * 16
        _, is_done = await streamed(port, max_tokens=5)
        assert is_done
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], r"must be in \[0, 65535\], not 65536"),
        (["--pages", "0"], r"must be in \[1, 2147483647\], not 0"),
        (["--drain", "nan"], "must be positive and finite, not nan"),
        (["--drain", "-1"], "must be positive and finite, not -1"),
    ],
)
def test_a_bad_argument_is_named_with_its_bound(arguments, message, capsys):
    with pytest.raises(SystemExit):
        _parser().parse_args(arguments)
    assert re.search(message, capsys.readouterr().err)
