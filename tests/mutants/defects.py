"""Deliberate defects: a programmer's mistakes, each of which breaks a law.

Every one leaves the happy path as it was. ``old`` stands exactly once in its file.
"""

from __future__ import annotations

from typing import NamedTuple


class Defect(NamedTuple):
    name: str
    law: str
    path: str
    """Below ``asyncache/``."""
    old: str
    new: str


DEFECTS = [
    # Loads: publish after land, no reuse before quiescence.
    Defect(
        "a load that nothing was said of counts as done, before its bytes came",
        "L1",
        "core/_votes.py",
        """\
        for seq, share in ballot.shares.items():
""",
        """\
        for seq, transaction in ballot.table.items():
            if type(transaction).__name__ == "Load" and seq not in self._claims:
                vector[HEADER_INTS + 2 * transaction.place + 1] = 1
        for seq, share in ballot.shares.items():
""",
    ),
    Defect(
        "a load ends before the load above it has",
        "L1",
        "core/_loads.py",
        """\
    if any(node.loads[pool] not in {None, load} for node in above for pool in full):
        return
""",
        """\
    del above, full
""",
    ),
    Defect(
        "a load that falls short keeps its first bad page",
        "L1",
        "core/_loads.py",
        "cut(state, load, load.start + claim)",
        "cut(state, load, load.start + claim + 1)",
    ),
    Defect(
        "a hit settles when the first of its loads has landed",
        "L1",
        "core/_loads.py",
        """\
        del request.needs[load]
        if not request.needs:
            settle(state, request)
""",
        """\
        del request.needs[load]
        settle(state, request)
""",
    ),
    Defect(
        "what was to be committed above a cut is committed all the same",
        "L1",
        "core/_loads.py",
        """\
    request.want = 0
    # A load""",
        """\
    # A load""",
    ),
    Defect(
        "pages of a load that was cut are free before its copy has stopped",
        "L2",
        "core/_loads.py",
        """\
    state.ledgers[pool].move(run, PageState.TRANSIT, PageState.QUARANTINE)
    load.held.append((pool, run))
""",
        """\
    state.ledgers[pool].give(run, PageState.TRANSIT)
""",
    ),
    Defect(
        "a load that lost a page is over at once, though it still copies",
        "L2",
        "core/_verdicts.py",
        """\
        if news.is_quiet(load):
            end_load(state, load)
""",
        """\
        end_load(state, load)
""",
    ),
    Defect(
        "cancelling one request cuts a load that another awaits",
        "L6",
        "core/_loads.py",
        """\
    for load in needs:
        del load.interest[request]
    for load in needs:
        if not load.interest:
            cut(""",
        """\
    for load in needs:
        del load.interest[request]
    for load in needs:
        if load:
            cut(""",
    ),
    Defect(
        "nobody tells a transfer that its load was cut",
        "L10",
        "core/_loads.py",
        """\
        state.effects.append(Stop(load.seq))
""",
        "",
    ),
    Defect(
        "a load that failed is tried again by the request that it failed",
        "L8",
        "core/_loads.py",
        "request.barred = request.barred or not resident",
        "request.barred = False",
    ),
    Defect(
        "promises stand though the pages behind them are in quarantine",
        "L4",
        "core/_loads.py",
        """\
    demote(state, fallen)
""",
        "",
    ),
    # Commits and the brackets of forwards.
    Defect(
        "a commit over a hit that has yet to land is published at once",
        "L1",
        "core/_commits.py",
        "        and not request.needs\n",
        "",
    ),
    Defect(
        "a commit shares a page of which only a part was computed",
        "L1",
        "core/_requests.py",
        "request.want = max(request.want, num_tokens // state.tree.page_tokens)",
        "request.want = max(request.want, pages_of(state, num_tokens))",
    ),
    Defect(
        "a commit that waits for a load survives the truncation of its tokens",
        "L1",
        "core/_requests.py",
        """\
    request.want = min(request.want, boundary)
""",
        "",
    ),
    Defect(
        "a reset queues for the store again what it forgets",
        "L10",
        "core/_offloads.py",
        """\
    # Last: one that never started has just had its nodes queued again.
    state.dirty.clear()
""",
        "",
    ),
    Defect(
        "a load goes on whose only restore was agreed on a longer hit",
        "L3",
        "core/_restores.py",
        """\
    for load in had:
        if not load.interest:
            cut(state, load, load.start)
""",
        "",
    ),
    Defect(
        "a commit that waits for a load is lost when its request ends well",
        "L6",
        "core/_requests.py",
        """\
    if request.needs and request.want > request.shared:
        state.closing""",
        """\
    if request.needs and request.want < 0:
        state.closing""",
    ),
    Defect(
        "page ids of a request change when others have shared the same tokens",
        "L2",
        "core/_commits.py",
        """\
    state.unpin(request.anchor)
    request.anchor = node
    return True
""",
        """\
    state.unpin(request.anchor)
    request.anchor = node
    for pool in state.tree.full:
        table, own = request.tables[pool], request.own[pool]
        twice = [table[place] for place in range(node.end) if own[place]]
        state.release(pool, twice, PageState.REQUEST)
        table[: node.end] = state.tree.pages_on(node, pool)
        own[: node.end] = bytes(node.end)
    return True
""",
    ),
    Defect(
        "what is given back under a forward is free at once: there is no bracket",
        "L2",
        "core/_state.py",
        """\
        if self.brackets:
""",
        """\
        if was is PageState.QUARANTINE:
""",
    ),
    Defect(
        "what is given back under two forwards waits for the older one only",
        "L2",
        "core/_state.py",
        "newest = next(reversed(self.brackets.values()))",
        "newest = next(iter(self.brackets.values()))",
    ),
    Defect(
        "a forward keeps no prefix that it reads",
        "L2",
        "core/_brackets.py",
        "pins = [request.anchor for request in requests if request.anchor is not None]",
        "pins: list[Node] = []",
    ),
    Defect(
        "a page is offloaded while the forward that writes it runs",
        "L2",
        "core/_commits.py",
        """\
                node.written = max(node.written, bracket.number)
""",
        "",
    ),
    Defect(
        "a forward keeps windows from eviction that it does not write",
        "L4",
        "core/_state.py",
        "for n, at, pools in bracket.writes if pool in pools]",
        "for n, at, _ in bracket.writes]",
    ),
    Defect(
        "window pages that an open forward may write are evicted",
        "L2",
        "core/_state.py",
        """\
        for bracket in self.brackets.values():
            spans += [(n, at) for n, at, pools in bracket.writes if pool in pools]
""",
        "",
    ),
    # Offloads.
    Defect(
        "an offload whose parent is missing counts as stored: -1 is true",
        "L9",
        "core/_offloads.py",
        "elif offload.claim == GOOD:",
        "elif offload.claim:",
    ),
    Defect(
        "a write that failed is taken for a parent that is missing",
        "L6",
        "core/_offloads.py",
        "if claim == PARENT_MISSING and parent.parent is not None:",
        "if claim != GOOD and parent.parent is not None:",
    ),
    Defect(
        "an offload that failed gives up its pages while a write still reads them",
        "L2",
        "core/_verdicts.py",
        "if news.is_quiet(offload):",
        "if news.is_quiet(offload) or offload.claim != 1:",
    ),
    Defect(
        "offloads may take every place, and loads find none",
        "L4",
        "core/_offloads.py",
        """\
        if state.num_offloading >= state.bounds.offloads:
            return
""",
        "",
    ),
    Defect(
        "an offload that a detach met is called stored when it ends",
        "L10",
        "core/_offloads.py",
        """\
        transfer.is_void = True
""",
        "",
    ),
    Defect(
        "pages that were evicted while they waited for the store are offloaded",
        "L2",
        "core/_state.py",
        """\
        self._forget_ready(node)
        self.tree.detach""",
        """\
        self.tree.detach""",
    ),
    Defect(
        "what is left above a queued leaf that was evicted loses its turn",
        "L9",
        "core/_state.py",
        """\
            if not (is_root or parent.stored) and parent.offload is None:
                self.dirty[parent] = None
""",
        """\
            del is_root
""",
    ),
    # Restores and reservations.
    Defect(
        "a prompt is served whole from the cache: nothing is left to compute",
        "L8",
        "core/_reservations.py",
        "return (request.num_tokens - 1) // state.layout.page_tokens",
        "return request.num_tokens // state.layout.page_tokens",
    ),
    Defect(
        "what was evicted since the store was asked is loaded unasked",
        "L8",
        "core/_restores.py",
        "if resident < boundary and walk.covered >= min(lookup.covered, boundary):",
        "if resident < boundary:",
    ),
    Defect(
        "a reservation is granted whether or not there is room",
        "L4",
        "core/_reservations.py",
        "page_slack(state) >= request.num_reserve - hit",
        "page_slack(state) >= 0",
    ),
    Defect(
        "a small request overtakes a large one that waits for room",
        "L4",
        "core/_reservations.py",
        """\
            state.refused = _room(state, request)
            break
""",
        """\
            state.refused = _room(state, request)
            continue
""",
    ),
    Defect(
        "a refusal is remembered when what it hung on has changed",
        "L4",
        "core/_reservations.py",
        "return (*prompt, state.promised, state.tree.version, *counts)",
        "return (*prompt, state.promised, *counts)",
    ),
    # Requests.
    Defect(
        "a load outlives the only request that wanted it",
        "L3",
        "core/_requests.py",
        """\
    withdraw(state, request)
""",
        "",
    ),
    Defect(
        "a suspended request is unpinned twice",
        "L3",
        "core/_requests.py",
        """\
    _start_over(state, request)
    request.barred = False
""",
        """\
    if request.anchor is not None and state.pins[request.anchor] > 1:
        state.unpin(request.anchor)
    _start_over(state, request)
    request.barred = False
""",
    ),
    Defect(
        "a truncation gives back pages that are shared",
        "L3",
        "core/_requests.py",
        "shared = max(request.shared, request.hit) * state.tree.page_tokens",
        "shared = request.hit * state.tree.page_tokens",
    ),
    # Verdicts, votes, the digest.
    Defect(
        "a verdict is read through the slots of now, not of its ballot",
        "L5",
        "core/_verdicts.py",
        """\
        for _, transaction in sorted(ballot.table.items()):
            at =""",
        """\
        for _, transaction in sorted(state.agenda.placed.items()):
            at =""",
    ),
    Defect(
        "a claim that has sunk may rise again",
        "L1",
        "core/_votes.py",
        "self._claims[seq] = min(claim, self._claims.get(seq, NOTHING))",
        "self._claims[seq] = claim",
    ),
    Defect(
        "ranks take the least of their longest boundaries, which may be nobody's",
        "L5",
        "core/_votes.py",
        "if share is None or not claim:",
        "if share is None or claim in share.boundaries:",
    ),
    Defect(
        "ranks do not notice that they append different tokens",
        "L5",
        "core/_calls.py",
        'self._called(b"append", request, len(tokens), zlib.crc32(tokens))',
        'self._called(b"append", request, len(tokens))',
    ),
    Defect(
        "looking for a match makes it recent, on the rank that looks",
        "L5",
        "core/_look.py",
        """\
        return servable(tree, walk, limit, resident=True) * tree.page_tokens
""",
        """\
        for node in walk.path:
            node.used = self._state.clock
        return servable(tree, walk, limit, resident=True) * tree.page_tokens
""",
    ),
    Defect(
        "a match counts pages that are still loading",
        "L1",
        "core/_look.py",
        "servable(tree, walk, limit, resident=True)",
        "servable(tree, walk, limit)",
    ),
    # Tree, eviction, ledger.
    Defect(
        "a split forgets that its upper part is on its way to the store",
        "L2",
        "core/_tree.py",
        "upper.stored, upper.offload = node.stored, node.offload",
        "upper.stored = node.stored",
    ),
    Defect(
        "the two parts of a split share one list of loads",
        "L1",
        "core/_tree.py",
        "upper.loads[pool] = node.loads[pool]",
        "upper.loads = node.loads",
    ),
    Defect(
        "eviction takes leaves that are pinned",
        "L2",
        "core/_eviction.py",
        """\
        and not node.locks
""",
        "",
    ),
    Defect(
        "eviction goes by what was known when a leaf was offered",
        "policy",
        "core/_eviction.py",
        """\
            if now == key:
                return node
""",
        """\
            if now >= key:
                return node
""",
    ),
    Defect(
        "window eviction takes pages that a load still fills",
        "L2",
        "core/_state.py",
        """\
            if node.loads[pool] is None
        ]
        require(""",
        """\
        ]
        require(""",
    ),
    Defect(
        "pages in quarantine count as free",
        "L2",
        "core/_ledger.py",
        "return len(self._free)\n",
        "return len(self._free) + self._num[PageState.QUARANTINE]\n",
    ),
    # Boundaries and keys.
    Defect(
        "the first page that is missing counts as stored",
        "L8",
        "core/_boundaries.py",
        "end = min(end, ask.start + missing)",
        "end = min(end, ask.start + missing + 1)",
    ),
    Defect(
        "two windows are cut one after the other, and need not agree",
        "L1",
        "core/_boundaries.py",
        """\
        if shorter == end:
            return end
        end = shorter
""",
        """\
        return shorter
""",
    ),
    Defect(
        "a prefix that is shorter than its window is never restored",
        "L8",
        "core/_boundaries.py",
        "if run >= min(window, position + 1):",
        "if run >= window:",
    ),
    Defect(
        "a page's name covers its own tokens only",
        "L7",
        "core/_hashes.py",
        "tag + sha256(digest + tokens[start : start + stride]).digest()[rest]",
        "tag + sha256(parent + tokens[start : start + stride]).digest()[rest]",
    ),
    Defect(
        "a page's name does not begin with its namespace's tag",
        "L7",
        "core/_hashes.py",
        "tag + sha256(digest + tokens[start : start + stride]).digest()[rest]",
        "sha256(digest + tokens[start : start + stride]).digest()",
    ),
    Defect(
        "a tag depends on the type of a namespace's parts no more",
        "L7",
        "core/_hashes.py",
        'text = frame(b"asyncache/tag/1", _namespace_bytes(namespace))',
        'text = frame(b"asyncache/tag/1", str(namespace).encode())',
    ),
    Defect(
        "an empty namespace is none",
        "L7",
        "core/_hashes.py",
        "if namespace is None:",
        "if not namespace:",
    ),
    # Resets.
    Defect(
        "a reset forgets to begin a generation: what was computed before is shared",
        "L10",
        "core/_resets.py",
        """\
    state.generation += 1
""",
        "",
    ),
    Defect(
        "new weights find the stored pages of the old ones",
        "L7",
        "core/_resets.py",
        """\
    state.layout = layout
""",
        "",
    ),
    Defect(
        "a reset frees pages that a request still reads",
        "L2",
        "core/_state.py",
        "elif run is not None and not node.locks:",
        "elif run is not None and not (node.locks and node.attached):",
    ),
    Defect(
        "a reset lets loads land in a tree that is gone",
        "L10",
        "core/_resets.py",
        """\
    _stop_transfers(state)
    nodes =""",
        """\
    nodes =""",
    ),
    # States and windows.
    Defect(
        "a split takes the last pages of a node for its first ones",
        "L8",
        "core/_tree.py",
        "(above := position - node.start_of(pool)) > 0:",
        "(above := position - node.start) > 0:",
    ),
    Defect(
        "a boundary may be where no state was kept",
        "L8",
        "core/_boundaries.py",
        """\
        if first > node.start:
            run_start = first
""",
        "",
    ),
    Defect(
        "a forward goes on from whatever its slot holds, not from its hit's state",
        "L8",
        "core/_reservations.py",
        "request.slots.is_behind = bool(hit and state.tree.states)",
        "request.slots.is_behind = False",
    ),
    Defect(
        "a forward begins while the state of its hit is on its way",
        "L1",
        "core/_slots.py",
        "if request.lookup is not None or request.needs:",
        "if request.lookup is not None:",
    ),
    Defect(
        "a commit lets go of a state that no forward has copied yet",
        "L2",
        "core/_commits.py",
        "        and not request.slots.is_behind\n",
        "",
    ),
    Defect(
        "no bracket keeps a state that its forward has yet to write",
        "L2",
        "core/_commits.py",
        """\
            state.effects += state.news.cached(node, pool)
            given.append(pool)
""",
        """\
            state.effects += state.news.cached(node, pool)
            if not is_state:
                given.append(pool)
""",
    ),
    Defect(
        "a state slot is free before the forward that writes it has ended",
        "L2",
        "core/_slots.py",
        """\
    for pool, slot in zip(state.tree.states, request.slots.own, strict=False):
        state.release(pool, array("i", [slot]), PageState.REQUEST)
""",
        """\
    for pool, slot in zip(state.tree.states, request.slots.own, strict=False):
        state.ledgers[pool].give([slot], PageState.REQUEST)
""",
    ),
    Defect(
        "a checkpoint is free before the forward that copies it has ended",
        "L2",
        "core/_slots.py",
        """\
        for pool, slot in request.slots.checkpoints.pop(boundary).items():
            state.release(pool, array("i", [slot]), PageState.REQUEST)
""",
        """\
        for pool, slot in request.slots.checkpoints.pop(boundary).items():
            state.ledgers[pool].give([slot], PageState.REQUEST)
""",
    ),
    Defect(
        "a checkpoint of tokens that were taken back is published",
        "L8",
        "core/_requests.py",
        """\
    drop_checkpoints(state, request, range(boundary + 1, request.extent + 1))
""",
        "",
    ),
    Defect(
        "a checkpoint takes the slot that was promised to a load",
        "L4",
        "core/_state.py",
        "promised = self.promised_slots if is_state else self.promised",
        "promised = 0 if is_state else self.promised",
    ),
    Defect(
        "a restore is granted without a slot for what it may load",
        "L4",
        "core/_reservations.py",
        "and slot_slack(state) >= own_slots(state, request) + loaded",
        "and slot_slack(state) >= own_slots(state, request)",
    ),
    Defect(
        "a load's slot is promised, and taken all the same from what it builds on",
        "L4",
        "core/_loads.py",
        """\
    move_anchor(state, request, node)
    for gap""",
        """\
    for gap""",
    ),
    Defect(
        "windows and states that came late never reach the store",
        "L9",
        "core/_commits.py",
        """\
    if given:
        node.stored = False
""",
        "",
    ),
    Defect(
        "an offload calls a state stored that it never took",
        "L8",
        "core/_commits.py",
        """\
    if isinstance(node.offload, Offload):
        return []
    lacking""",
        """\
    lacking""",
    ),
    Defect(
        "an offload asks for its parent's page where only states are kept",
        "L9",
        "core/_offloads.py",
        "key=lambda pool: pool != tree.backbone",
        "key=lambda pool: pool",
    ),
    Defect(
        "with more boundaries than a ballot has room for, states are found by chance",
        "L8",
        "core/_votes.py",
        "            first -= first % stride\n",
        "",
    ),
    Defect(
        "a window's first page goes one token too early",
        "L2",
        "core/_requests.py",
        "edge = (request.computed - window_tokens) // state.tree.page_tokens",
        "edge = (request.computed + 1 - window_tokens) // state.tree.page_tokens",
    ),
    Defect(
        "a window has passed what no forward has computed",
        "L2",
        "core/_requests.py",
        "edge = (request.computed - window_tokens) // state.tree.page_tokens",
        "edge = (request.extent - window_tokens) // state.tree.page_tokens",
    ),
    Defect(
        "window pages go that a parked commit has yet to publish",
        "L8",
        "core/_requests.py",
        "            edge = min(edge, request.shared)\n",
        "            pass\n",
    ),
    Defect(
        "window pages are free under the forward that reads them",
        "L2",
        "core/_requests.py",
        """\
            state.release(pool, pages, PageState.REQUEST)
            table""",
        """\
            state.ledgers[pool].give(pages, PageState.REQUEST)
            table""",
    ),
    Defect(
        "tokens may be taken back whose window has passed",
        "L2",
        "core/_requests.py",
        "least = max(1, shared, _least_in_windows(state, request))",
        "least = max(1, shared)",
    ),
    Defect(
        "tokens that were rejected count as computed, and their window passes",
        "L2",
        "core/_requests.py",
        "    request.computed = min(request.computed, num_tokens)\n",
        "",
    ),
    Defect(
        "eviction takes the pinned end of a window with its beginning",
        "L2",
        "core/_state.py",
        """\
        while free and free[-1] in held:
            free.pop()
""",
        "",
    ),
    Defect(
        "of a window that is there in part, the rest is not loaded",
        "L8",
        "core/_loads.py",
        """\
    _split_at_gaps(state, base, end)
    node = base""",
        """\
    node = base""",
    ),
    # Engine: transfers, driver, runtime.
    Defect(
        "a transfer that was told to stop votes that it has",
        "L2",
        "engine/_transfers.py",
        """\
            scope.cancel()
        if timer""",
        """\
            scope.cancel()
            self._votes.quiet(seq)
        if timer""",
    ),
    Defect(
        "a transfer that raised vouches for everything",
        "L1",
        "engine/_transfers.py",
        """\
        if seq not in self._vouched:
            self._votes.sink(seq, 0)
""",
        "",
    ),
    Defect(
        "an error of a kind that no store should raise ends every transfer",
        "L6",
        "engine/_transfers.py",
        "except Exception as error:  # noqa: BLE001 - a store is foreign code",
        "except OSError as error:",
    ),
    Defect(
        "a third party's cancellation of a transfer is nobody's failure",
        "L6",
        "engine/_transfers.py",
        """\
            if self._is_stopped:
                raise
""",
        """\
            if self._group is not None:
                raise
""",
    ),
    Defect(
        "a store that is down is asked all the same",
        "L6",
        "engine/_transfers.py",
        "        if trial is None:\n            return\n",
        "        trial = trial or self._health._trial\n",
    ),
    Defect(
        "a transfer that was cancelled before its first step never votes",
        "L10",
        "engine/_transfers.py",
        """\
            task.add_done_callback(lambda _: self._bury(kind, plan))
""",
        "",
    ),
    Defect(
        "transfers begin though the task that holds them was killed",
        "L10",
        "engine/_transfers.py",
        """\
                    # Also if this task was killed: nothing begins any more.
                    self.stop_all()
""",
        """\
                    self._stop = None
""",
    ),
    Defect(
        "who gave up a lookup waits on for a load of another's",
        "L4",
        "engine/_runtime.py",
        """\
            self._late.add(state.seq)
""",
        "",
    ),
    Defect(
        "a hit that sank keeps the gates of what it stood on before",
        "L1",
        "engine/_base_request.py",
        """\
            self._landing.loads = loads
""",
        """\
            del loads
""",
    ),
    Defect(
        "a lookup loads on a promise that was taken back",
        "L4",
        "core/_restores.py",
        "if boundary > request.hit and request.promise >= request.num_reserve:",
        "if boundary > request.hit:",
    ),
    Defect(
        "a forward that ends first ends those before it",
        "L2",
        "engine/_driver.py",
        "self._votes.finished = oldest - 1",
        "self._votes.finished = max(number, oldest - 1)",
    ),
    Defect(
        "what was voted on a transaction that has ended is kept for ever",
        "L3",
        "engine/_driver.py",
        """\
            if not self.replica.look.is_open(seq):
                self._votes.forget(seq)
""",
        """\
            del seq
""",
    ),
    Defect(
        "an observer is told before the requests that it concerns",
        "L9",
        "engine/_driver.py",
        "self._facts.append(effect)",
        "self._tell_observer(effect)",
    ),
    Defect(
        "a restore does not end at its deadline",
        "L4",
        "engine/_runtime.py",
        """\
            self.queues.out(self.health.failed, TransferKind.LOAD)
        self.give_up(state)
""",
        """\
            self.queues.out(self.health.failed, TransferKind.LOAD)
""",
    ),
    Defect(
        "one waiter's deadline fails the load that others await",
        "L6",
        "engine/_runtime.py",
        """\
            self.driver.sink(state.wait.seq, 0)
        self.driver""",
        """\
            self.driver.sink(state.wait.seq, 0)
            for load in state.needs:
                self.driver.sink(load.seq, 0)
        self.driver""",
    ),
    Defect(
        "the clock of a restore that was given back ends the next one",
        "L4",
        "engine/_runtime.py",
        """\
        self._late.discard(state.seq)
        self._cancel_deadline(state)
""",
        """\
        self._late.discard(state.seq)
""",
    ),
    Defect(
        "a request that is collected in another thread ends in that one",
        "thread",
        "engine/_runtime.py",
        "if self.driver.is_in_core or not self.queues.is_home():",
        "if self.driver.is_in_core:",
    ),
    Defect(
        "an abort is applied as a normal end",
        "L3",
        "engine/_runtime.py",
        """\
        if aborted:
            self.driver.sink(state.seq, 0)
        # Its""",
        """\
        # Its""",
    ),
    # Engine: gates, health, faces.
    Defect(
        "a gate opens one layer early",
        "L1",
        "engine/_gates.py",
        "return self.is_over or self.num_landed > layer",
        "return self.is_over or self.num_landed >= layer > 0",
    ),
    Defect(
        "a load whose gate had to be forced open may still land as good",
        "L1",
        "engine/_gates.py",
        """\
            self.give_up(load.seq)
""",
        "",
    ),
    Defect(
        "a gate waits for ever",
        "L4",
        "engine/_gates.py",
        "with anyio.move_on_after(self._board.gate_s):",
        "with anyio.CancelScope():",
    ),
    Defect(
        "a look-up that is answered hides the reads that fail",
        "L6",
        "engine/_health.py",
        "self._num_failures[kind] = 0",
        "self._num_failures = dict.fromkeys(TransferKind, 0)",
    ),
    Defect(
        "a second cancellation of aclose() leaves transfers behind",
        "L10",
        "engine/_patience.py",
        "while not task.done() and loop.time() < until:",
        "if not task.done():",
    ),
    Defect(
        "an attach that was cancelled leaves a store attached",
        "L3",
        "engine/_life.py",
        """\
            self._forget(runtime, transfers)
            if""",
        """\
            if""",
    ),
    Defect(
        "a request is settled as soon as its restore is agreed",
        "L1",
        "engine/_base_request.py",
        "return not self._open_state().needs",
        "return self._open_state().lookup is None",
    ),
    Defect(
        "a handler that is cancelled ends as if all were well",
        "L3",
        "engine/_base_request.py",
        "self._finish(aborted=kind is not None)",
        "self._finish(aborted=kind is not None and issubclass(kind, Exception))",
    ),
    Defect(
        "a request that its owner lost keeps its pages",
        "L3",
        "engine/_base_request.py",
        """\
            self._runtime.abandon(self._state)
""",
        "",
    ),
    Defect(
        "a restore that was cancelled stays open",
        "L3",
        "engine/_request.py",
        """\
            self._give_up(landing)
""",
        "",
    ),
    Defect(
        "a deadline may be no number",
        "bad input",
        "engine/_limits.py",
        "if not 0 <= value < math.inf:",
        "if value < 0 or value == math.inf:",
    ),
    # Several ranks.
    Defect(
        "a boundary is the least of what each can restore at most, not what all can",
        "L8",
        "core/_votes.py",
        """\
        if verdict[share.offset + index]:
            return boundary
    return 0
""",
        """\
        if boundary <= claim:
            return boundary
    return 0
""",
    ),
    Defect(
        "ranks reduce though there is nothing to agree on",
        "L5",
        "engine/_barrier.py",
        "if self._driver.replica.look.needs_verdict:",
        "if self._driver.replica is not None:",
    ),
    Defect(
        "a rank that has nothing to say takes no part in the reduce",
        "L5",
        "engine/_barrier.py",
        "if self._driver.replica.look.needs_verdict:",
        "if self._driver.replica.look.needs_verdict and self._driver.has_news:",
    ),
    Defect(
        "ranks agree on how many have ended, not on which",
        "L3",
        "core/_votes.py",
        """\
        for seq in self._quiet:
            if seq in ballot.table:
                vector[HEADER_INTS + 2 * ballot.table[seq].place + 1] = 1
""",
        """\
        num_quiet = len(self._quiet & ballot.table.keys())
        for transaction in list(ballot.table.values())[:num_quiet]:
            vector[HEADER_INTS + 2 * transaction.place + 1] = 1
""",
    ),
    Defect(
        "a verdict counts for whoever holds the places by now",
        "L3",
        "core/_verdicts.py",
        """\
        for _, transaction in sorted(ballot.table.items()):
""",
        """\
        held = {t.seq: t for t in state.agenda.open.values() if t.place >= 0}
        for _, transaction in sorted(held.items()):
""",
    ),
    Defect(
        "a call is made though a step is owed",
        "L5",
        "engine/_barrier.py",
        """\
        if self._is_owed:
            raise OrderError("a step() was cut short: await it again, then call")
""",
        "",
    ),
    Defect(
        "a pipelined step takes the verdict before only if it has come",
        "L5",
        "engine/_barrier.py",
        """\
        if self._is_pipelined:
            await self._collect()
""",
        """\
        if self._is_pipelined and (self._round is None or self._round.task.done()):
            await self._collect()
""",
    ),
    Defect(
        "the digest is left out",
        "L5",
        "core/_verdicts.py",
        "if least != -negated:",
        "if least is None:",
    ),
    Defect(
        "the digest leaves out which tokens were appended",
        "L5",
        "core/_calls.py",
        'self._called(b"append", request, len(tokens), zlib.crc32(tokens))',
        'self._called(b"append", request, len(tokens))',
    ),
    Defect(
        "a rank vouches for a forward that it has only begun",
        "L2",
        "engine/_driver.py",
        """\
        self._last_bracket = number
        return number
""",
        """\
        self._last_bracket = number
        if not self._is_alone:
            self._votes.finished = number
        return number
""",
    ),
    Defect(
        "a handler that leaves ends its request on its own rank at once",
        "L5",
        "engine/_base_request.py",
        "            if self._runtime.is_alone:\n",
        "            if self._runtime is not None:\n",
    ),
    Defect(
        "a handler that leaves settles its hit on its own rank at once",
        "L5",
        "engine/_runtime.py",
        "if request is not None and self.is_alone:",
        "if request is not None:",
    ),
    Defect(
        "a clock of one rank settles a hit",
        "L5",
        "engine/_base_request.py",
        "            self._landing.give_up(error)\n",
        "            self._landing.error = error\n            self._landing.settle()\n",
    ),
    Defect(
        "a rank without a scope never agrees to a request's end",
        "L4",
        "engine/_ranked.py",
        "                self.driver.quiet(request.id)\n",
        "                pass\n",
    ),
    Defect(
        "a silent rank is waited for twice as long",
        "L4",
        "engine/_barrier.py",
        "async with asyncio.timeout(timeout_s):",
        "async with asyncio.timeout(2 * timeout_s):",
    ),
    Defect(
        "ranks that mean different caches open them",
        "L5",
        "engine/_handshake.py",
        "    if differ:\n",
        "    if differ and not num_pages:\n",
    ),
    Defect(
        "a store is attached where another rank has none",
        "L5",
        "engine/_life.py",
        "runtime.barrier.agree(is_fine=error is None)",
        "runtime.barrier.agree(is_fine=True)",
    ),
    Defect(
        "a detach that is called again is a second call",
        "L5",
        "engine/_life.py",
        "if runtime.replica.look.has_store:",
        "if runtime.replica is not None:",
    ),
    Defect(
        "a prefetch leaves its request behind where calls end requests",
        "L10",
        "engine/_cache.py",
        "        runtime.dismiss({seq: False})\n",
        "",
    ),
    Defect(
        "what was refused on every rank waits to be admitted again",
        "L10",
        "engine/_base_request.py",
        """\
        if self._end is not None:
            # It was refused""",
        """\
        if self._end is not None and self._is_left:
            # It was refused""",
    ),
    # Linkers and threads.
    Defect(
        "layers are called landed though a page was bad",
        "L1",
        "linkers/_store_linker.py",
        "if good == plan.end:",
        "if good > plan.start:",
    ),
    Defect(
        "good pages behind a bad one count too",
        "L1",
        "linkers/_store_linker.py",
        """\
        if status is not Status.HIT:
            return index
""",
        """\
        if status is not Status.HIT:
            return sum(status is Status.HIT for status in statuses)
""",
    ),
    Defect(
        "of two bad pages, the one that was read last counts",
        "L1",
        "linkers/_store_linker.py",
        "good = min(good, batch.start + num_good)",
        "good = batch.start + num_good",
    ),
    Defect(
        "a page is stored though its parent is gone",
        "L8",
        "linkers/_batches.py",
        "if plan.parent is None:",
        "if plan.parent is None or plan.start > 0:",
    ),
    Defect(
        "an offload is stored as soon as one of its pages is",
        "L9",
        "linkers/_store_linker.py",
        "if list(statuses) != [Status.HIT] * len(batch.pages):",
        "if Status.HIT not in statuses:",
    ),
    Defect(
        "a second cancellation does not wait for the thread that still copies",
        "L2",
        "threads/_outlast.py",
        "while not over.is_set():",
        "if not over.is_set():",
    ),
    # CUDA: what the driver refuses fails alone, what runs is waited for.
    Defect(
        "a refused copy is over at once",
        "L2",
        "devices/_cuda.py",
        """\
            copy.marked(lane.mark(stream, copy.passed))
""",
        """\
            if copy.refused:
                copy.passed(None)
            else:
                copy.marked(lane.mark(stream, copy.passed))
""",
    ),
    Defect(
        "a copy that has no event is over at once",
        "L2",
        "devices/_cuda_lane.py",
        "            return code_of(cuda.cuStreamSynchronize(self.stream))\n",
        "            return 0\n",
    ),
    Defect(
        "what is refused ends the device",
        "L6",
        "devices/_cuda_api.py",
        """\
        return self.failure or DeviceError(f"{what}: {describe(code)}")
""",
        """\
        self.failure = self.failure or DeviceError(f"{what}: {describe(code)}")
        return self.failure
""",
    ),
    Defect(
        "a handle that is no stream is the end of the GPU",
        "L6",
        "devices/_cuda_api.py",
        "        if state not in _LOCAL:\n            self.judge(state)\n",
        "        if state not in _LOCAL:\n            self.judge(state)\n"
        "        else:\n            self.failure = DeviceError(what)\n",
    ),
    Defect(
        "a lost GPU is the affair of the copy that finds it lost",
        "L6",
        "devices/_cuda_api.py",
        "        if self.failure is None:\n            self.failure = DeviceError(\n",
        "        if self.failure is None:\n            return DeviceError(\n",
    ),
    Defect(
        "a cancelled write returns before its copy is over",
        "L2",
        "devices/_copy.py",
        """\
            await outlast(self._over)
        finally:
            if not self.is_over:
""",
        """\
            await self._over.wait()
        except GeneratorExit:
            if not self.is_over:
""",
    ),
    Defect(
        "an event goes back to the pool while its thread still waits",
        "L2",
        "devices/_cuda_lane.py",
        """\
            if mark.event is not None:
                # Only now: this thread may have been the last to wait for it.
                self._events.give(mark.event)

    def _over(self, mark: Mark, code: int) -> None:
        error = self._context.judge(code)
        # One at a time, or the watch would tell of the next while this is being told.
        with self._telling:
            if mark.is_over:
                return
            mark.is_over = True
""",
        """\

    def _over(self, mark: Mark, code: int) -> None:
        error = self._context.judge(code)
        # One at a time, or the watch would tell of the next while this is being told.
        with self._telling:
            if mark.is_over:
                return
            mark.is_over = True
            if mark.event is not None:
                self._events.give(mark.event)
""",
    ),
    Defect(
        "nobody finds what a lost wake-up hid",
        "L4",
        "devices/_cuda_lane.py",
        "                lane.look()\n",
        "                del lane\n",
    ),
    Defect(
        "a forward on a stalled stream holds up all others",
        "L6",
        "devices/_cuda_lane.py",
        "            if mark.stream not in waiting:\n",
        "            if not waiting:\n",
    ),
    Defect(
        "a device gives memory back that a copy still touches",
        "L10",
        "devices/_cuda.py",
        "        if self._num_pending:\n            raise DeviceError(\n",
        "        if self._num_pending and self._words:\n"
        "            raise DeviceError(\n",
    ),
    Defect(
        "two closes at once free everything twice",
        "L10",
        "devices/_cuda.py",
        "        if self._freeing is None:\n            # On a thread",
        "        if self._freeing is None or not self._freeing.done():\n"
        "            # On a thread",
    ),
    Defect(
        "a word is the next user's while a copy is still to raise it",
        "L2",
        "devices/_cuda_words.py",
        """\
        with suppress(DeviceError), self._context:
            self._lane.mark(self._stream, passed)
""",
        """\
        passed(None)
""",
    ),
    Defect(
        "a late copy leaves a word low that was given back",
        "L4",
        "devices/_cuda_words.py",
        "            self.put(index, base)\n",
        "            pass\n",
    ),
    Defect(
        "what was pinned stays pinned when the rest is refused",
        "L3",
        "devices/_cuda_pinned.py",
        "starts[:count]",
        "starts[:0]",
    ),
    # Streams of a GPU: what was given to one has not run yet.
    Defect(
        "a forward lets go of its pages when its block is left",
        "L2",
        "engine/_forwards.py",
        "self._device.when_done(stream, done)",
        "done()",
    ),
    Defect(
        "a forward is over when another stream has run",
        "L2",
        "engine/_forwards.py",
        "self._device.when_done(stream, done)",
        "self._device.when_done(None, done)",
    ),
    Defect(
        "a load that failed leaves the streams waiting that were told to",
        "L4",
        "engine/_gates.py",
        """\
            self.word.release()
            self.word = None
""",
        """\
            self.word = None
""",
    ),
    Defect(
        "streams are let go by a clock of the thread that waits for them",
        "L4",
        "engine/_gates.py",
        "self.queues.out(self._watch, load, layer)",
        """\
self.queues.soon(
            partial(self.queues.call_later, self.gate_s), self.give_up_on, load, layer
        )""",
    ),
    Defect(
        "a stream reads a layer whose copies have yet to begin",
        "L1",
        "engine/_gates.py",
        "load.word.hold(stream, layer + 1)",
        "load.word.hold(stream, layer)",
    ),
    Defect(
        "a state that could not be kept is shared",
        "L1",
        "engine/_base_request.py",
        """\
            self._finish(aborted=True)
            raise
""",
        """\
            raise
""",
    ),
    Defect(
        "a forward runs over a state that could not be copied",
        "L1",
        "engine/_slots.py",
        "return any((pool, target) in own for pool, _, target in copies)",
        "return any((pool, source) in own for pool, source, _ in copies)",
    ),
    Defect(
        "a copy that was refused counts as landed",
        "L1",
        "devices/_cuda_copy.py",
        "self.finish(self._lost or self.refused)",
        "self.finish(self._lost)",
    ),
    Defect(
        "a copy that the GPU died under counts as landed",
        "L1",
        "devices/_cuda_copy.py",
        "self.finish(self._lost or self.refused)",
        "self.finish(self.refused)",
    ),
    Defect(
        "a buffer is lent again while a copy out of it runs",
        "L2",
        "linkers/_store_linker.py",
        """\
            if copy is None:
                give()
        if copy is not None:
            flight.add(copy, give)
""",
        """\
            give()
        if copy is not None:
            flight.add(copy, lambda: None)
""",
    ),
    Defect(
        "nobody waits for loads, as far as turns know",
        "L4",
        "linkers/_store_linker.py",
        "Urgency.PREFETCH if plan.is_prefetch else Urgency.LOAD",
        "Urgency.PREFETCH",
    ),
    Defect(
        "who joins a prefetch waits as if it were one",
        "L4",
        "core/_reservations.py",
        """\
                state.effects.append(Hurry(load.seq))
""",
        "                pass\n",
    ),
    Defect(
        "a prefetch that joins a load makes it one",
        "L4",
        "core/_reservations.py",
        "if load.is_prefetch and not request.is_prefetch:",
        "if load.is_prefetch:",
    ),
    Defect(
        "offloads may take all turns",
        "L4",
        "linkers/_turns.py",
        "room = self._free if is_load else min(self._free, self._free_to_others)",
        "room = self._free",
    ),
    Defect(
        "turns go by age, whoever waits",
        "L4",
        "linkers/_turns.py",
        "key=lambda waiter: (waiter.ticket.urgency, waiter.order)",
        "key=lambda waiter: waiter.order",
    ),
    Defect(
        "a turn that comes to one who was cancelled is lost",
        "L3",
        "linkers/_turns.py",
        """\
            if waiter.turn is not None:
                waiter.turn.end()
            else:
""",
        """\
            if waiter.turn is None:
""",
    ),
    Defect(
        "what one namespace was refused, all wait for",
        "L6",
        "engine/_health.py",
        "self._full_until.get(tag, 0.0)",
        "max(self._full_until.values(), default=0.0)",
    ),
    Defect(
        "a namespace over its bound keeps what it has",
        "L3",
        "stores/_segment_quotas.py",
        "if most is not None and (used := self._used(tag)) > most:",
        "if most is not None and (used := self._used(tag)) > 2 * most:",
    ),
    Defect(
        "a namespace over its bound costs others their pages",
        "L6",
        "stores/_segment_quotas.py",
        '" AND hash BETWEEN ?2 AND ?3 ORDER BY seq"',
        "\" AND hash > x'' AND ?2 < ?3 ORDER BY seq\"",
    ),
    Defect(
        "room is counted under whatever cap",
        "L3",
        "stores/_file_room.py",
        "counted is not None and counted[1] == cap",
        "counted is not None",
    ),
    Defect(
        "room of a page that was not written is lost",
        "L3",
        "stores/_file.py",
        """\
            room.give_back(num_bytes)
""",
        "            pass\n",
    ),
    Defect(
        "of a prefix in files the first page gives way first",
        "L4",
        "stores/_file.py",
        "self._write(key, sources[index], used_ns, stop)",
        "self._write(key, sources[index], time.time_ns(), stop)",
    ),
    Defect(
        "the youngest pages of a capped directory go first",
        "L3",
        "stores/_file_room.py",
        "pages.sort(key=lambda entry: entry.used_ns)",
        "pages.sort(key=lambda entry: -entry.used_ns)",
    ),
    Defect(
        "a thread that waits is not told that its job should end",
        "L4",
        "threads/_workers.py",
        """\
            for interrupt in self._interrupts:
                interrupt()
""",
        """\
            del self
""",
    ),
    # A server of pages.
    Defect(
        "a server that is silent is waited for without end",
        "L4",
        "stores/_redis.py",
        "self._split(keys, sizes), timeout_s=timeout_s)",
        "self._split(keys, sizes))",
    ),
    Defect(
        "rotten bytes of a server are a hit",
        "L1",
        "stores/_redis_pages.py",
        """\
            and frame.are_slices_of(head, self._layers, buffers)
""",
        "",
    ),
    Defect(
        "another page's bytes under this name are a hit",
        "L7",
        "stores/_redis_pages.py",
        "frame.is_head_of(page_hash, head)",
        "frame.is_head_of(page_hash, head) is not None",
    ),
    Defect(
        "a corrupt page stays on its server",
        "L8",
        "stores/_redis.py",
        "if statuses[index] is Status.CORRUPT",
        "if statuses[index] is Status.REJECTED",
    ),
    Defect(
        "an error of a server is a miss",
        "L8",
        "stores/_redis_pages.py",
        """\
            case Bulk.REFUSED:
                return Status.UNAVAILABLE
""",
        """\
            case Bulk.REFUSED:
                return Status.MISS
""",
    ),
    Defect(
        "a server that is full seems to be down",
        "L6",
        "stores/_redis_pages.py",
        'line.startswith(b"-OOM")',
        'line.startswith(b"-FULL")',
    ),
    Defect(
        "a connection is used again though its server was restarted",
        "L6",
        "stores/_redis_nodes.py",
        "if wire.is_idle():",
        "if wire is not None:",
    ),
    Defect(
        "a page of the wrong length costs those behind it their answers",
        "L6",
        "stores/_redis_wire.py",
        "            self._skip(size)\n",
        "",
    ),
    # ObjectStore.
    Defect(
        "a bucket that is silent is waited for without end",
        "L4",
        "stores/_object.py",
        "anyio.move_on_after(self._timeout_s)",
        "anyio.CancelScope()",
    ),
    Defect(
        "a pack that was not stored is pointed at",
        "L1",
        "stores/_object_writes.py",
        "if shelf.is_packed and made is Made.NOW:",
        "if shelf.is_packed:",
    ),
    Defect(
        "a pointer that was not answered has its pack deleted",
        "L8",
        "stores/_object_writes.py",
        "if not {Made.NOW, Made.UNKNOWN} & set(made):",
        "if Made.NOW not in made:",
    ),
    Defect(
        "rotten bytes of a bucket are a hit",
        "L1",
        "stores/_object_pages.py",
        "not frame.are_slices_of(head, layers, buffers)",
        "not buffers",
    ),
    Defect(
        "another page's pointer leads to a page",
        "L7",
        "stores/_object_pages.py",
        "is_good = data.endswith(digest) and version == _VERSION",
        "is_good = digest and version == _VERSION",
    ),
    Defect(
        "pages whose pack cannot be read now are removed",
        "L8",
        "stores/_object_reads.py",
        "elif status is not Status.UNAVAILABLE:",
        "else:",
    ),
    Defect(
        "a pointer that is out of date is not asked for again",
        "L8",
        "stores/_object_reads.py",
        "            self._catalog.forget(key)\n            place",
        "            place",
    ),
    Defect(
        "a page that is found corrupt stays in its bucket",
        "L8",
        "stores/_object_reads.py",
        "        await self._lane.each(list(self._doubts), drop)\n",
        "        del drop\n",
    ),
    Defect(
        "a pack is garbage before its writer has pointed at it",
        "L1",
        "stores/_object_census.py",
        "_STALE = timedelta(hours=1)",
        "_STALE = timedelta(0)",
    ),
    Defect(
        "a bucket that is full seems to be down",
        "L6",
        "stores/_object_bucket.py",
        "return Made.NO_ROOM if _NO_ROOM.search(str(error)) else Made.UNKNOWN",
        "return Made.UNKNOWN",
    ),
    # Stores, and codecs over them.
    Defect(
        "slices that rotted are served, if they are the first",
        "L7",
        "stores/_page_files.py",
        "if not self._frame.are_slices_of(self._head, self._layers, buffers):",
        """\
if self._layers.start and not self._frame.are_slices_of(
            self._head, self._layers, buffers
        ):""",
    ),
    Defect(
        "pages of two element types of one width are the same files",
        "L7",
        "core/_layout.py",
        'return f"{self.pool}-{self.shard}-{self.dtype}-{shape}"',
        'return f"{self.pool}-{self.shard}-{ITEM_BYTES[self.dtype]}-{shape}"',
    ),
    Defect(
        "a page that is there is put again, in another size",
        "L7",
        "stores/_coded.py",
        "        found = await self._find(places)\n        statuses",
        "        found = [None for _ in places]\n        statuses",
    ),
    Defect(
        "a coded page that is corrupt stays where it is",
        "L9",
        "stores/_coded.py",
        "await self._inner.remove([places[index] for index in bad])",
        "del bad",
    ),
    Defect(
        "a call goes on in an inner store that was closed meanwhile",
        "L10",
        "stores/_coded.py",
        "if coded and not self._has_ended():",
        "if coded:",
    ),
    Defect(
        "a compressed page is known by its hash, whatever its bytes mean",
        "L7",
        "stores/_compressed.py",
        'hashlib.sha256(b"asyncache/zstd/2/" + key.name.encode()).digest()',
        'hashlib.sha256(b"asyncache/zstd/2/" + key.hash).digest()',
    ),
    Defect(
        "compressed slices of a page may change places",
        "L7",
        "stores/_compressed.py",
        "xxh3_64(page_hash + _NUMBER.pack(layer))",
        "xxh3_64(page_hash + _NUMBER.pack(0 * layer))",
    ),
    Defect(
        "a nonce is used again when a page is",
        "L7",
        "stores/_encrypted.py",
        "nonce = secrets.token_bytes(_NONCE_BYTES)",
        "nonce = _LAYER.pack(layer).rjust(_NONCE_BYTES)",
    ),
    Defect(
        "a tag fits the same layer of any page",
        "L7",
        "stores/_encrypted.py",
        "return _LAYER.pack(layer) + key.name.encode()",
        "return _LAYER.pack(layer) + key.name[:0].encode()",
    ),
    Defect(
        "another secret finds pages that it cannot read, and removes them",
        "L6",
        "stores/_encrypted.py",
        'PageHash(key.tag + self._derive(b"name", key)[TAG_BYTES:])',
        'PageHash(hmac.digest(b"name", key.name.encode(), "sha256"))',
    ),
    Defect(
        "a namespace without a key is encrypted under another's",
        "L7",
        "stores/_encrypted.py",
        "return self._secrets.get(key.tag, self._every)",
        "return self._every or next(iter(self._secrets.values()))",
    ),
    Defect(
        "who writes pages goes on while others read",
        "L8",
        "stores/_batches.py",
        "        stop.pause()\n",
        "",
    ),
    Defect(
        "a read that hangs keeps every write",
        "L4",
        "threads/_pauses.py",
        "            self._idle.wait(left_s)",
        "            self._idle.wait()",
    ),
    Defect(
        "reads one after the other keep every write",
        "L4",
        "threads/_pauses.py",
        "            self._left_s -= passed_s",
        "            self._left_s -= 0 * passed_s",
    ),
    Defect(
        "each of those that wait pays for all",
        "L8",
        "threads/_pauses.py",
        "            self._left_s -= passed_s",
        "            self._left_s -= self._num_waiting * passed_s",
    ),
    Defect(
        "once in a while reads are let pass, and no more",
        "L8",
        "threads/_pauses.py",
        "self._left_s + _EARNED * passed_s)",
        "self._left_s)",
    ),
    Defect(
        "pages of a put that was called off are claims for ever",
        "L3",
        "stores/_segment_put.py",
        "            workers.executor.submit(finish)",
        "            pass",
    ),
    Defect(
        "a page that is named twice is in its own way",
        "L4",
        "stores/_segment.py",
        "if not is_clear and len(once",
        "if not keys and len(once",
    ),
    Defect(
        "a page that gave way to its own put is a hit",
        "L2",
        "stores/_slot_pages.py",
        "        outcomes.clear()  # one that was there may have given way since\n",
        "",
    ),
    # A store that processes share.
    Defect(
        "a page is told of before its bytes are in place",
        "L1",
        "stores/_slot_pages.py",
        """\
            written.update(self._write_run(slot, run))
""",
        """\
            told = [(item[1], slot + at) for at, item in enumerate(run)]
            self._index.publish(self._space, told)
            self._write_run(slot, run)
""",
    ),
    Defect(
        "where a page was is where it is, whoever changed the index",
        "L7",
        "stores/_slot_pages.py",
        "if now is None or now != self._seen or len(self._places) > _MOST_PLACES:",
        "if now is None or len(self._places) > _MOST_PLACES:",
    ),
    Defect(
        "what was seen in the middle of a commit holds after it",
        "L7",
        "stores/_segment_version.py",
        "        self._write(_BEGUN, number)\n        try:",
        "        try:",
    ),
    Defect(
        "a commit cut short is a version to rely on",
        "L7",
        "stores/_segment_version.py",
        " if begun == done else None",
        "",
    ),
    Defect(
        "who is late with a commit undoes the number of the next",
        "L7",
        "stores/_segment_version.py",
        "if self._read(_DONE) < number:",
        "if self._write(_BEGUN, number) is None:",
    ),
    Defect(
        "a commit that cannot be told of is none",
        "L3",
        "stores/_segment_version.py",
        "with suppress(OSError):",
        "with suppress(ZeroDivisionError):",
    ),
    Defect(
        "a page that cannot be written costs those beside it their places",
        "L6",
        "stores/_slot_pages.py",
        """\
                self._slots.write(slot + at, buffers, heads[at])
                written[page_hash] = slot + at
""",
        """\
                self._slots.write_run(slot, [b for _, _, b in run], heads)
                written[page_hash] = slot + at
""",
    ),
    Defect(
        "of a prefix the first page gives way first",
        "L4",
        "stores/_segment_index.py",
        "?4 - key, ?5 + key",
        "?5 + key, ?5 + key",
    ),
    Defect(
        "of a prefix that was read the first page gives way first",
        "L4",
        "stores/_slot_pages.py",
        "self._stock.note_used(self._space, hits[::-1])",
        "self._stock.note_used(self._space, hits)",
    ),
    Defect(
        "what a put has not told of yet is in its own way",
        "L4",
        "stores/_slot_pages.py",
        "if len(slots) < len(missing) and tell():",
        "if len(slots) < 0 and tell():",
    ),
    Defect(
        "slots of pages that nobody was told of are lost",
        "L3",
        "stores/_stock.py",
        """\
            self.give(one.space, [one.slot])
""",
        "            pass\n",
    ),
    Defect(
        "claims of the living are reclaimed",
        "L3",
        "stores/_owners.py",
        """\
    except OSError:
        return True
    else:
""",
        """\
    except OSError:
        return False
    else:
""",
    ),
    Defect(
        "claims of the dead are kept",
        "L3",
        "stores/_segment_index.py",
        "lambda other: other != owner and not is_alive(other)",
        "lambda other: other == '' and not is_alive(other)",
    ),
    Defect(
        "a slot that was recycled while it was read is a hit without digests",
        "L2",
        "stores/_slot_pages.py",
        "return self._digests\n        return status is",
        "return True\n        return status is",
    ),
    Defect(
        "a page that was stored anew is taken for the one that was read",
        "L2",
        "stores/_slot_pages.py",
        "if now.get(h) != found[h]}",
        "if h not in now or now[h].slot != found[h].slot}",
    ),
    Defect(
        "a corrupt page stays in its slot",
        "L6",
        "stores/_slot_pages.py",
        "        if useless:\n",
        "        if useless and not self._digests:\n",
    ),
    Defect(
        "eviction takes the newest page",
        "L8",
        "stores/_segment_room.py",
        "ORDER BY seq LIMIT ?)",
        "ORDER BY seq DESC LIMIT ?)",
    ),
    Defect(
        "a page is evicted before its last use is told of",
        "L8",
        "stores/_segment_index.py",
        """\
            self._touch(used)
            slots = self._take_free(space, count)
            while""",
        """\
            slots = self._take_free(space, count)
            while""",
    ),
    Defect(
        "a segment is taken from under a writer",
        "L2",
        "stores/_segment_room.py",
        "home NOT IN (SELECT slot / ?2 FROM claim)",
        "home NOT IN (SELECT slot / ?2 FROM claim WHERE space != ?1)",
    ),
    Defect(
        "a slot is nobody's when another process was first with its page",
        "L3",
        "stores/_segment_index.py",
        "if num_added < len(stored):",
        "if num_added < 0:",
    ),
    Defect(
        "a page is told of though its claim was taken",
        "L3",
        "stores/_segment_index.py",
        "for page_hash, slot in pages if slot in ours}",
        "for page_hash, slot in pages if ours is not None}",
    ),
    Defect(
        "claims idle when no put is under way",
        "L3",
        "stores/_stock.py",
        "if self._num_expected > 0 and not is_over:",
        "if not is_over:",
    ),
    Defect(
        "a commit that failed leaves its transaction open",
        "L6",
        "stores/_segment_database.py",
        "if self._connection.in_transaction:",
        "if not self._connection.in_transaction:",
    ),
    Defect(
        "a transaction waits though nobody waits for it",
        "L4",
        "stores/_segment_database.py",
        "or is_over or stop.wait(pause_s):",
        "or is_over or time.sleep(pause_s):",
    ),
    Defect(
        "a store is left while its threads still write",
        "L10",
        "threads/_workers.py",
        """\
                self.executor.shutdown(cancel_futures=True)
                if last is not None:
                    last()
""",
        """\
                if last is not None:
                    last()
                self.executor.shutdown(cancel_futures=True)
""",
    ),
]
