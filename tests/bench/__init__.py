"""Benchmarks: ours beside a plain baseline or a peer, in turns, in one run."""
