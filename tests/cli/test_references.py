"""The numbers that others found for the whole traces, to the token."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"no whole traces at {TRACES}"),
]

UNLIMITED = {
    "conversation": {
        "pages": 288_500,
        "tokens": 144_793_823,
        "resident": 182_790,
        "hit_pages": 105_710,
        "hit_tokens": 54_063_104,
        "fully_hit": 118,
    },
    "synthetic": {
        "pages": 121_877,
        "tokens": 61_194_628,
        "resident": 43_924,
        "hit_pages": 77_953,
        "hit_tokens": 39_802_880,
        "fully_hit": 213,
    },
}
# Capacity: hit blocks, hit tokens. The LRU ones agree with kvcache-simulator 0.1.3.
CONVERSATION = {
    1_000: (12_847, 6_572_544),
    3_000: (18_850, 9_634_304),
    10_000: (61_046, 31_217_664),
    30_000: (93_978, 48_060_928),
    50_000: (102_290, 52_312_064),
    100_000: (104_924, 53_660_672),
    150_000: (105_598, 54_005_760),
}
SYNTHETIC = {
    1_000: (10_252, 5_242_368),
    3_000: (23_226, 11_870_720),
    10_000: (51_669, 26_394_112),
    30_000: (76_077, 38_848_000),
}
# Folder, page: hit pages, pages, distinct; then hit pages by capacity.
TEXTS = {
    ("miniswe", 16): (
        (566_545, 604_494, 37_949),
        {1_897: 402_080, 7_589: 560_568, 18_974: 566_000},
    ),
    ("miniswe", 64): (
        (141_482, 150_975, 9_493),
        {474: 100_370, 1_898: 139_996, 4_746: 141_345},
    ),
    ("miniswe", 256): (
        (35_216, 37_582, 2_366),
        {118: 24_933, 473: 34_836, 1_183: 35_182},
    ),
    ("taubench", 16): (
        (16_791, 19_305, 2_514),
        {125: 12_684, 502: 16_782, 1_257: 16_786},
    ),
    ("taubench", 64): ((4_026, 4_647, 621), {31: 3_034, 124: 4_024, 310: 4_025}),
    ("taubench", 256): ((838, 980, 142), {8: 644, 28: 838, 71: 838}),
}


def capacities(sizes):
    return "--device-pages", ",".join(map(str, sizes))


def mooncake(name):
    return TRACES / f"mooncake_{name}_trace.jsonl"


@pytest.mark.parametrize("name", UNLIMITED)
def test_mooncake_without_a_limit(replay, name):
    report = replay(mooncake(name))
    (run,) = report["runs"]
    assert {field: run[field] for field in UNLIMITED[name]} == UNLIMITED[name]
    assert report["distinct_pages"] == run["device_pages"] == run["resident"]


@pytest.mark.parametrize(
    ("name", "known"), [("conversation", CONVERSATION), ("synthetic", SYNTHETIC)]
)
def test_mooncake_with_lru(replay, name, known):
    runs = replay(mooncake(name), *capacities(known))["runs"]
    found = {run["device_pages"]: (run["hit_pages"], run["hit_tokens"]) for run in runs}
    assert found == known
    assert [run["resident"] for run in runs] == list(known)


@pytest.mark.parametrize(
    ("name", "page_tokens", "hit_tokens", "distinct"),
    [
        ("conversation", 16, 54_097_440, 5_662_916),
        ("conversation", 64, 54_093_952, 1_411_425),
        ("conversation", 256, 54_082_048, 348_284),
        ("synthetic", 16, 39_850_800, 1_332_108),
        ("synthetic", 64, 39_846_336, 331_666),
        ("synthetic", 256, 39_827_712, 81_770),
    ],
)
def test_mooncake_in_smaller_pages(replay, name, page_tokens, hit_tokens, distinct):
    report = replay(mooncake(name), "--page-tokens", page_tokens)
    (run,) = report["runs"]
    assert (run["hit_tokens"], report["distinct_pages"]) == (hit_tokens, distinct)


@pytest.mark.parametrize(("folder", "page_tokens"), TEXTS)
def test_texts_without_a_limit(replay, folder, page_tokens):
    path = TRACES / "lmcache_agent" / folder
    report = replay(path, "--page-tokens", page_tokens)
    (run,) = report["runs"]
    found = (run["hit_pages"], run["pages"], report["distinct_pages"])
    assert found == TEXTS[folder, page_tokens][0]


@pytest.mark.parametrize(("folder", "page_tokens"), TEXTS)
def test_texts_with_lru(replay, folder, page_tokens):
    path, known = TRACES / "lmcache_agent" / folder, TEXTS[folder, page_tokens][1]
    runs = replay(path, "--page-tokens", page_tokens, *capacities(known))["runs"]
    assert {run["device_pages"]: run["hit_pages"] for run in runs} == known
