"""A case in words: what it consists of, and the command that plays it again."""

from __future__ import annotations

from collections.abc import Iterator

from asyncache.testing.simulation import Actor, Case, Mishap, Setting, draw, plain


def describe(case: Case) -> list[str]:
    """Return who and what a case is made of, line by line."""
    lines = []
    for number, actors in enumerate(case.epochs):
        who = [_who(actor, case) for actor in actors]
        if who:
            lines.append(f"epoch {number}: {', '.join(who)}")
    wrong = [f"{mishap.value} ({rate:g})" for mishap, rate in _mishaps(case)]
    lines.append(f"mishaps: {', '.join(wrong) or 'none'}")
    pages = ", ".join(f"{count} of {name!r}" for name, count in case.num_pages.items())
    lines.append(f"pages: {pages}; {case.writes!r}, {case.launch} launch")
    if case.team is not None:
        lines.append(
            f"{case.num_ranks} ranks: {case.team.barrier} barrier,"
            f" aborts by {case.team.aborts}, forwards overlap {case.team.overlap} steps"
        )
    return lines


def command(case: Case) -> str:
    """Return the command that plays exactly this case, which came from a drawn one."""
    drawn = draw(case.seed, case.num_ranks)
    words = [f"python -m asyncache sim --seed {case.seed}"]
    if case.num_ranks > 1:
        words.append(f"--ranks {case.num_ranks}")
    numbers = [actor.number for actor in case.actors]
    if len(numbers) < len(drawn.actors):
        words.append(f"--only {','.join(map(str, numbers)) or 'none'}")
    kept = [mishap for mishap, _ in _mishaps(case)]
    gone = [mishap.name for mishap, _ in _mishaps(drawn) if mishap not in kept]
    if gone:
        words.append(f"--without {','.join(gone)}")
    made_plain = [s.value for s in Setting if _is_plain(case, s, drawn)]
    if made_plain:
        words.append(f"--plain {','.join(made_plain)}")
    return " ".join(words)


def _who(actor: Actor, case: Case) -> str:
    where = f" on rank {actor.rank}" if case.team else ""
    return f"{actor.role.name.lower()} {actor.number}{where} at {actor.at_s} s"


def _mishaps(case: Case) -> Iterator[tuple[Mishap, float]]:
    for mishap, rate in case.rates.items():
        if rate:
            yield mishap, rate


def _is_plain(case: Case, setting: Setting, drawn: Case) -> bool:
    return plain(case, setting) == case and plain(drawn, setting) != drawn
