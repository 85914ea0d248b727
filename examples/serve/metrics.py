"""One snapshot of a cache as Prometheus metrics; nothing is counted here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from asyncache import KVCache, Statistics


class CacheCollector(Collector):
    """Reads ``cache.statistics()`` once a scrape."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        """Return every metric of one snapshot."""
        statistics = self._cache.statistics()
        yield from _pages(statistics)
        yield from _now(statistics)
        yield from _tokens(statistics)
        yield from _moved(statistics)
        yield from _ends(statistics)


def _pages(statistics: Statistics) -> Iterable[Metric]:
    replica = statistics.replica
    pages = GaugeMetricFamily(
        "asyncache_pages",
        "Pages of a pool by who holds them; the sum is the pool.",
        labels=["pool", "state"],
    )
    for pool, counts in replica.pools.items():
        for state, count in asdict(counts).items():
            pages.add_metric([pool, state], count)
    yield pages
    is_idle = not replica.num_open and not statistics.transfers
    yield GaugeMetricFamily(
        "asyncache_leaked_pages",
        "Pages neither free nor cached though no request and no transfer is open. A"
        " forward may hold some until it ends; those that stay are a bug.",
        statistics.leaked_pages if is_idle else 0,
    )
    yield GaugeMetricFamily(
        "asyncache_promised_pages",
        "Pages that open requests were promised and have not taken.",
        replica.promised_pages,
    )
    yield GaugeMetricFamily(
        "asyncache_evictable_pages",
        "Cached pages that nobody stands on.",
        replica.evictable_pages,
    )


def _now(statistics: Statistics) -> Iterable[Metric]:
    replica = statistics.replica
    yield GaugeMetricFamily(
        "asyncache_requests", "Requests that are open.", replica.num_requests
    )
    yield GaugeMetricFamily(
        "asyncache_waiting_requests",
        "Requests that wait for room.",
        replica.num_waiting,
    )
    yield GaugeMetricFamily(
        "asyncache_transfers",
        "Lookups, loads and offloads that run.",
        statistics.transfers,
    )
    yield GaugeMetricFamily(
        "asyncache_tree_nodes", "Nodes of the prefix tree.", replica.num_nodes
    )


def _tokens(statistics: Statistics) -> Iterable[Metric]:
    counters = statistics.counters
    yield _total("lookup_tokens", "Tokens of prompts.", counters.lookup_tokens)
    yield _totals(
        "hit_tokens",
        "Tokens of prompts that were found, by where.",
        "tier",
        {"device": counters.device_tokens, "store": counters.store_tokens},
    )
    yield _total(
        "shortened_hits", "Hits of which a part did not come.", counters.shortened
    )


def _moved(statistics: Statistics) -> Iterable[Metric]:
    counters = statistics.counters
    yield _total("load_pages", "Pages that landed.", counters.loaded_pages)
    yield _total("load_bytes", "Bytes that landed.", counters.loaded_bytes)
    yield _total(
        "load_cut_pages", "Pages that were to land and did not.", counters.cut_pages
    )
    yield _total("committed_pages", "Pages made shareable.", counters.published_pages)
    yield _total("offload_pages", "Pages that were stored.", counters.stored_pages)
    yield _total("offload_bytes", "Bytes that were stored.", counters.stored_bytes)
    yield _total("offload_failures", "Offloads that failed.", counters.offloads_failed)
    yield _total(
        "offload_dropped_pages",
        "Pages that were to be stored and were given up.",
        counters.forgotten_pages,
    )
    yield _totals(
        "evicted_pages",
        "Pages that made room for others, by whether the store has them.",
        "state",
        {"clean": counters.evicted_pages, "unsaved": counters.evicted_unsaved_pages},
    )


def _ends(statistics: Statistics) -> Iterable[Metric]:
    counters = statistics.counters
    yield _totals(
        "ended_requests",
        "Requests that have ended, by how.",
        "end",
        {"closed": counters.closed, "aborted": counters.aborted},
    )
    stages = {
        "waiting": counters.aborted_waiting,
        "lookup": counters.aborted_looking_up,
        "loading": counters.aborted_loading,
        "computing": counters.aborted_computing,
    }
    stages["opened"] = counters.aborted - sum(stages.values())
    yield _totals(
        "cancelled",
        "Requests that were aborted, by what they were doing.",
        "state",
        stages,
    )
    yield _total(
        "late_completions",
        "Answers of the store to whom nobody asked any more.",
        counters.late_completions,
    )
    yield _total(
        "transfer_failures",
        "Lookups, loads and offloads that failed.",
        counters.transfers_failed,
    )


def _total(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"asyncache_{name}", what, value)


def _totals(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"asyncache_{name}", what, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
