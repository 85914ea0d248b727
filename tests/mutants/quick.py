"""A pytest plugin: the first counterexample is enough, so none is made smaller."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    stateful_step_count=30,
    phases=[Phase.explicit, Phase.generate],
)
