"""The replay finds what a naive cache finds, whatever lies between."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial

import pytest

from tests.cli import naive

UNLIMITED = 10**9


def mooncake(traces, name, page_tokens):
    return traces / f"{name}.jsonl", partial(
        naive.mooncake, traces / f"{name}.jsonl", page_tokens
    )


def taubench(traces, page_tokens):
    folder = traces / "taubench"
    return folder, partial(naive.texts, folder, page_tokens)


def expected(read, num_pages, page_tokens):
    """Return the fields of a run that a naive cache knows."""
    cache = naive.Cache(num_pages)
    found = naive.replay(read(), cache, page_tokens)
    ends = {"evicted": cache.evicted, "resident": len(cache.used)}
    return asdict(found) | ends


def assert_agrees(run, known):
    assert {name: run[name] for name in known} == known


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize("page_tokens", [64, 256, 512])
def test_an_unlimited_device_keeps_all_of_a_mooncake_trace(
    traces, replay, name, page_tokens
):
    path, read = mooncake(traces, name, page_tokens)
    report = replay(path, "--page-tokens", page_tokens)
    (run,) = report["runs"]
    assert run["is_infinite"]
    assert run["device_pages"] == report["distinct_pages"] == run["resident"]
    assert_agrees(run, expected(read, UNLIMITED, page_tokens))


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_an_unlimited_device_keeps_all_of_a_text_trace(traces, replay, page_tokens):
    path, read = taubench(traces, page_tokens)
    (run,) = replay(path, "--page-tokens", page_tokens)["runs"]
    assert_agrees(run, expected(read, UNLIMITED, page_tokens))


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_small_device_evicts_the_coldest_leaf_of_a_mooncake_trace(
    traces, replay, name
):
    path, read = mooncake(traces, name, 512)
    sizes = [40, 150, 500]
    runs = replay(path, "--device-pages", ",".join(map(str, sizes)))["runs"]
    for run, num_pages in zip(runs, sizes, strict=True):
        assert run["device_pages"] == num_pages
        assert_agrees(run, expected(read, num_pages, 512))


def test_a_small_device_evicts_the_coldest_leaf_of_a_text_trace(traces, replay):
    path, read = taubench(traces, 16)
    sizes = [3, 10, 30, 100, 200]
    arguments = [part for size in sizes for part in ("--device-pages", size)]
    runs = replay(path, *arguments)["runs"]
    for run, num_pages in zip(runs, sizes, strict=True):
        assert_agrees(run, expected(read, num_pages, 16))


def test_pages_and_tokens_have_their_defaults(traces, replay):
    assert replay(traces / "synthetic.jsonl")["page_tokens"] == 512
    assert replay(traces / "taubench")["page_tokens"] == 16


def test_requests_of_several_files_come_in_the_order_of_their_timestamps(
    tmp_path, replay
):
    # In the order of the files the second "ab" would find the first one evicted.
    first = [{"timestamp": 1, "input": "ab"}, {"timestamp": 3, "input": "xy"}]
    second = [{"timestamp": 2, "input": "ab"}]
    for name, lines in (("1.jsonl", first), ("2.jsonl", second)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    arguments = ("--page-tokens", 2, "--device-pages", 1)
    assert replay(tmp_path, *arguments)["runs"][0]["hit_pages"] == 1
    unordered = tmp_path / "unordered"
    unordered.mkdir()
    lines = [json.dumps({"input": text}) for text in ("ab", "xy", "ab")]
    (unordered / "1.jsonl").write_text("\n".join(lines))
    assert replay(unordered, *arguments)["runs"][0]["hit_pages"] == 0


def test_a_prompt_that_fills_the_device_may_hit_all_of_it(tmp_path, replay):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input": "abcdefgh"}\n' * 3)
    for store in ("none", "memory"):
        arguments = ("--page-tokens", 2, "--device-pages", "2,4", "--store", store)
        small, whole = replay(path, *arguments)["runs"]
        assert (small["hit_pages"], small["longer_than_device"]) == (4, 3)
        assert (whole["hit_pages"], whole["hit_tokens"]) == (8, 12)
        assert (whole["fully_hit"], whole["evicted"] + whole["leaked"]) == (2, 0)


def test_prompts_shorter_than_a_page_hold_nothing(tmp_path, replay):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input": ""}\n{"input": "short"}\n')
    for store in ("none", "memory"):
        (run,) = replay(path, "--store", store, "--cancel-rate", 0.5)["runs"]
        assert (run["pages"], run["hit_tokens"], run["leaked"]) == (0, 0, 0)


@pytest.mark.parametrize("store", ["none", "memory"])
@pytest.mark.parametrize("num_pages", [100, "inf"])
def test_cancelled_requests_leave_nothing_behind(traces, replay, store, num_pages):
    arguments = ("--device-pages", num_pages, "--store", store, "--cancel-rate", 0.4)
    report = replay(traces / "synthetic.jsonl", *arguments, "--seed", 7)
    (run,) = report["runs"]
    assert 80 < run["cancelled"] < 160
    assert run["requests"] + run["cancelled"] == report["requests"] == 300
    assert (run["leaked"], run["left_open"], run["wrong_pages"]) == (0, 0, 0)
    again = replay(traces / "synthetic.jsonl", *arguments, "--seed", 7)
    other = replay(traces / "synthetic.jsonl", *arguments, "--seed", 8)
    del again["runs"][0]["seconds"], run["seconds"]
    assert again["runs"] == [run] != other["runs"]


def test_all_cancelled_is_nothing_served(traces, replay):
    (run,) = replay(traces / "taubench", "--cancel-rate", 1)["runs"]
    assert (run["requests"], run["pages"], run["resident"]) == (0, 0, 0)
    assert run["page_ratio"] == run["token_ratio"] == 0


def test_a_store_makes_up_for_a_small_device(traces, replay):
    path = traces / "conversation.jsonl"
    (without,) = replay(path)["runs"]
    runs = replay(path, "--store", "memory", "--device-pages", "300,inf")["runs"]
    for run in runs:
        assert run["hit_pages"] == without["hit_pages"]
        assert run["hit_tokens"] == without["hit_tokens"]
        assert run["stored"] == without["resident"]
        assert (run["leaked"], run["failures"], run["wrong_pages"]) == (0, 0, 0)
    small, unlimited = runs
    assert unlimited["store_hit_pages"] == 0 < small["store_hit_pages"]


def test_files_are_found_by_the_next_replay(tmp_path, traces, replay):
    arguments = ("--device-pages", 60, "--store", f"files:{tmp_path / 'pages'}")
    path = traces / "taubench"
    (first,) = replay(path, *arguments)["runs"]
    (second,) = replay(path, *arguments)["runs"]
    assert first["stored"] > 0 == second["stored"]
    assert first["hit_pages"] < second["hit_pages"]
    assert second["wrong_pages"] == second["failures"] == 0
    # Another trace, or other pages of the same, are not mistaken for it.
    (other,) = replay(path, *arguments, "--page-tokens", 32)["runs"]
    assert other["wrong_pages"] == 0 < other["stored"]
