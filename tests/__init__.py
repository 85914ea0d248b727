"""Everything but the package itself: tests, benchmarks, and what they run on."""
