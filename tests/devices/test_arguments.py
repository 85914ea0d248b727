"""What callers pass: checked at little cost, however large the pool."""

from __future__ import annotations

import pytest

from asyncache.devices._arguments import check_unique
from asyncache.devices._pieces import to_numpy


@pytest.mark.parametrize("num_pages", [8, 10**9])
def test_a_page_to_write_is_named_once_in_small_pools_and_large_ones(num_pages):
    check_unique(to_numpy([]), num_pages)
    check_unique(to_numpy([3, 1, 2]), num_pages)
    with pytest.raises(ValueError, match=r"must differ, got \[3, 1, 3\]"):
        check_unique(to_numpy([3, 1, 3]), num_pages)
