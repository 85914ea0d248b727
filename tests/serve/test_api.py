"""What OpenAI's clients ask for, and what they get."""

from __future__ import annotations

import json

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncache import InvariantError, Limits
from examples.serve.models import ByteText, TextStream
from tests.serve import fronts
from tests.serve.fronts import Front, serving
from tests.serve.scene import (
    MAX_TOKENS,
    NUM_PAGES,
    NUM_STORED,
    PROMPT,
    ask,
    call,
    completed,
    expected,
    got,
    room,
    streamed,
    until,
)

TEXT = ByteText().decode(expected(PROMPT, MAX_TOKENS))


def text_of(answer):
    return "".join(choice["text"] for choice in answer["choices"])


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
async def served(tmp_path):
    async with serving(fronts.app, tmp_path) as front:
        here = front.room
        yield front
        await here.check_clean()


async def test_a_plain_answer_is_the_stream_in_one_piece(served):
    status, answer = await completed(served.port)
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["finish_reason"] == "length"
    events, is_done = await streamed(served.port)
    assert is_done
    assert len({event["id"] for event in events}) == 1
    assert [event["choices"][0]["finish_reason"] for event in events] == [
        *([None] * (len(events) - 1)),
        "length",
    ]
    assert "".join(map(text_of, events)) == text_of(answer) == TEXT


async def test_a_prompt_may_be_token_ids(served):
    status, answer = await completed(served.port, prompt=ByteText().encode(PROMPT))
    assert (status, text_of(answer)) == (200, TEXT)


async def test_what_was_asked_before_counts_as_cached(served):
    _, first = await completed(served.port)
    _, second = await completed(served.port)
    assert cached(first) == 0
    assert cached(second) == NUM_STORED
    assert second["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": MAX_TOKENS,
        "total_tokens": len(PROMPT) + MAX_TOKENS,
        "prompt_tokens_details": {"cached_tokens": NUM_STORED},
    }
    assert text_of(first) == text_of(second)


async def test_what_a_store_kept_counts_as_cached(stored):
    async with room(stored) as here, fronts.app(here, Front(here)) as front:
        _, answer = await completed(front.port)
        assert cached(answer) == NUM_STORED
        assert text_of(answer) == TEXT
        await here.check_clean()


async def test_a_request_that_was_sent_back_reports_its_first_hit(tmp_path):
    """In a pool of 14 pages two requests cannot both grow to 11."""
    async with room(tmp_path, num_pages=14) as here:
        here.service.engine._reserve_tokens = 1
        prompts = [PROMPT[:50], PROMPT[:50].swapcase()]
        async with fronts.app(here, Front(here)) as front:
            answers = []

            async def one(prompt):
                answers.append(
                    await completed(front.port, prompt=prompt, max_tokens=120)
                )

            async with anyio.create_task_group() as clients:
                for prompt in prompts:
                    clients.start_soon(one, prompt)
            assert [status for status, _ in answers] == [200, 200]
            assert {text_of(answer) for _, answer in answers} == {
                ByteText().decode(expected(prompt, 120)) for prompt in prompts
            }
            # One of them found its own pages again, and they do not count as cached.
            counters = here.cache.statistics().counters
            assert counters.restores > 2
            assert counters.device_tokens + counters.store_tokens > 50
            assert [cached(answer) for _, answer in answers] == [0, 0]
            await here.check_clean()


async def test_users_do_not_share(served):
    for user in ("ann", "bob", None):
        _, first = await completed(served.port, user=user)
        _, second = await completed(served.port, user=user)
        assert (cached(first), cached(second)) == (0, NUM_STORED)


async def test_a_stream_tells_its_usage_if_asked(served):
    events, is_done = await streamed(
        served.port, stream_options={"include_usage": True}
    )
    assert is_done
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == MAX_TOKENS
    assert not any("usage" in event for event in events[:-1])


async def test_an_answer_that_stops_by_itself_says_so(served):
    answer = expected(PROMPT, MAX_TOKENS)
    stops = frozenset({answer[4]})
    served.room.service.engine._stop_tokens = stops
    object.__setattr__(served.room.service.served, "stop_tokens", stops)
    _, stopped = await completed(served.port)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    num_tokens = answer.index(answer[4]) + 1
    assert stopped["usage"]["completion_tokens"] == num_tokens


async def test_the_model_is_listed(served):
    status, body = await got(served.port, "/v1/models")
    assert status == 200
    assert [model["id"] for model in json.loads(body)["data"]] == ["tiny"]


# Bad input.


BAD_FIELDS = [
    ({"prompt": None}, "prompt", "prompt must be a string or token ids, not null"),
    ({"prompt": ""}, "prompt", "prompt must have at least 1 token, it is empty"),
    ({"prompt": []}, "prompt", "prompt must have at least 1 token, it is empty"),
    (
        {"prompt": [1, True]},
        "prompt",
        "prompt must be token ids, one of them is a boolean",
    ),
    (
        {"prompt": ["a", "b"]},
        "prompt",
        "prompt must be token ids, one of them is a string",
    ),
    ({"prompt": [512]}, "prompt", "prompt has token id 512, not in [0, 512)"),
    ({"prompt": [-1]}, "prompt", "prompt has token id -1, not in [0, 512)"),
    (
        {"prompt": [1] * 2049},
        "prompt",
        "prompt has 2049 tokens, the model takes 2048",
    ),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be in [1, 2048], not 0"),
    (
        {"max_tokens": 10**20},
        "max_tokens",
        f"max_tokens must be in [1, 2048], not {10**20}",
    ),
    (
        {"max_tokens": 1.5},
        "max_tokens",
        "max_tokens must be an integer, not 1.5",
    ),
    (
        {"max_tokens": True},
        "max_tokens",
        "max_tokens must be an integer, not a boolean",
    ),
    ({"stream": "yes"}, "stream", "stream must be true or false, not a string"),
    ({"user": 7}, "user", "user must be a string, not 7"),
    ({"n": 2}, "n", "n must be 1, not 2"),
    ({"n": [1]}, "n", "n must be 1, not an array"),
    (
        {"stream_options": []},
        "stream_options",
        "stream_options must be an object, not an array",
    ),
    (
        {"max_tokens": 2000},
        None,
        "132 tokens and 2000 to come, but the model takes 2048",
    ),
]
BAD_BODIES = [
    (b"", "the body is not JSON: "),
    (b"\xff", "the body is not JSON: "),
    (b"[" * 100_000, "the body is not JSON: "),
    (b"[]", "the body must be a JSON object, not an array"),
    (b'{"prompt": "\\ud800"}', "prompt is not text: "),
    (b'{"prompt": "x", "user": "\\udfff"}', "user is not text: "),
]


async def test_a_bad_field_is_named_with_its_bound(served):
    for fields, param, message in BAD_FIELDS:
        status, answer = await completed(served.port, **fields)
        error = {
            "message": message,
            "type": "invalid_request_error",
            "param": param,
            "code": None,
        }
        assert (status, answer) == (400, {"error": error}), fields
    assert served.room.cache.statistics().counters.restores == 0


async def test_a_body_that_is_none_is_refused(served):
    for body, message in BAD_BODIES:
        client = await call(served.port, "POST", "/v1/completions", body)
        status, answer = await client.read()
        assert status == 400
        assert json.loads(answer)["error"]["message"].startswith(message), message


async def test_a_model_that_is_not_served_is_not_found(served):
    status, answer = await completed(served.port, model="gpt-7")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, _ = await completed(served.port, model="tiny")
    assert status == 200


async def test_a_body_beyond_its_bound_is_refused(served):
    status, answer = await completed(served.port, prompt="x" * 2**20)
    assert status == 413
    assert answer["error"]["message"] == "the body has more than 1048576 bytes"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_larger_than_the_pool_is_refused(served, stream):
    prompt = "x" * (NUM_PAGES * 16 + 1)
    client = await ask(served.port, prompt=prompt, stream=stream)
    status, body = await client.read()
    assert status == 400
    message = json.loads(body)["error"]["message"]
    assert message == "a prompt of 33 pages cannot fit a pool of 32"


async def test_too_many_requests_are_told_to_come_back(tmp_path):
    async with serving(fronts.app, tmp_path, limits=Limits(requests=1)) as front:
        here = front.room
        here.model.hold_at(1)
        first = await ask(front.port)
        await here.model.held.wait()
        second = await ask(front.port, stream=True)
        answer = await second.reader.read()
        second.close()
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in answer.lower()
        assert b"rate_limit_error" in answer
        here.model.let_go()
        assert (await first.read())[0] == 200
        await here.check_clean()


# Failure.


async def test_a_model_that_fails_is_the_servers_fault_and_passes(served):
    served.room.model.is_broken = True
    status, answer = await completed(served.port)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    served.room.model.is_broken = False
    status, answer = await completed(served.port)
    assert (status, text_of(answer)) == (200, TEXT)
    assert (await got(served.port, "/healthz"))[0] == 200


async def test_a_stream_that_fails_says_so_and_is_not_done(served):
    model = served.room.model
    model.hold_at(10)
    client = await ask(served.port, stream=True)
    await model.held.wait()
    model.is_broken = True
    model.let_go()
    status, body = await client.read()
    last = json.loads(body.decode().split("\n\n")[-2].removeprefix("data: "))
    assert status == 200
    assert last["error"]["type"] == "server_error"
    assert "the model is broken" in last["error"]["message"]


async def test_the_health_tells_why_nothing_is_served(tmp_path):
    async with serving(fronts.app, tmp_path) as front:
        here = front.room
        assert await got(front.port, "/healthz") == (200, '{"status":"ok"}')
        here.model.hold_at(2)
        client = await ask(front.port)
        await here.model.held.wait()
        # A bug of the cache's own, while a request computes.
        here.cache._runtime.driver.fail(InvariantError("two and two are five"))
        here.model.let_go()
        status, _ = await client.read()
        assert status == 503
        await until(lambda: here.service._failure is not None)
        status, health = await got(front.port, "/healthz")
        assert status == 503
        assert json.loads(health)["status"] == "failed"
        assert "two and two are five" in json.loads(health)["reason"]
        status, answer = await completed(front.port)
        assert status == 503
        assert "two and two are five" in answer["error"]["message"]
        assert (await got(front.port, "/metrics"))[0] == 200


# Metrics.


def samples_of(text):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_metrics_add_up(served):
    here = served.room
    await completed(served.port)
    await completed(served.port)
    await here.check_clean()
    status, text = await got(served.port, "/metrics")
    assert status == 200
    samples = samples_of(text)
    states = {
        name[2]: value
        for name, value in samples.items()
        if "pages" in name[0][-5:] and name[0] == "asyncache_pages"
    }
    assert set(states) == {"free", "request", "tree", "transit", "quarantine"}
    assert sum(states.values()) == NUM_PAGES
    assert states["free"] + states["tree"] == NUM_PAGES
    assert samples[("asyncache_leaked_pages",)] == 0
    assert samples[("asyncache_lookup_tokens_total",)] == 2 * len(PROMPT)
    assert samples[("asyncache_hit_tokens_total", "device")] == NUM_STORED
    assert samples[("asyncache_hit_tokens_total", "store")] == 0
    assert samples[("asyncache_ended_requests_total", "closed")] == 2
    assert samples[("asyncache_ended_requests_total", "aborted")] == 0
    assert samples[("asyncache_offload_pages_total",)] == states["tree"]
    assert samples[("asyncache_evicted_pages_total", "unsaved")] == 0
    assert ("asyncache_late_completions_total",) in samples


async def test_while_a_request_is_open_its_pages_are_not_called_leaked(served):
    here = served.room
    here.model.hold_at(1)
    client = await ask(served.port)
    await here.model.held.wait()
    samples = samples_of((await got(served.port, "/metrics"))[1])
    assert samples[("asyncache_requests",)] == 1
    assert samples[("asyncache_pages", "kv", "request")] > 0
    assert samples[("asyncache_leaked_pages",)] == 0
    here.model.let_go()
    await client.read()


# Text.


def test_text_comes_in_whole_characters():
    stream = TextStream(ByteText())
    pieces = [stream.push(byte) for byte in "aé€😀".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    assert stream.end() == ""


def test_text_that_ends_in_the_middle_of_a_character_says_so():
    stream = TextStream(ByteText())
    assert stream.push("€".encode()[0]) == ""
    assert stream.end() == "\ufffd"


def test_what_is_no_text_is_not_waited_for_long():
    stream = TextStream(ByteText())
    pieces = [stream.push(0xFF) for _ in range(8)]
    assert "".join(pieces) == "\ufffd" * 8
