"""``store``: a store is looked after, whoever uses it meanwhile, and never harmed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from asyncache.cli import _store_export as export_room, main
from asyncache.core import PageKey
from asyncache.stores import (
    FileStore,
    RedisStore,
    SegmentStore,
    Status,
    Store,
    _directory,
    _segment_directory,
)
from asyncache.testing._samples import (
    LARGE_SPACE,
    OTHER_SPACE,
    SPACE,
    new_keys,
    new_source,
    new_target,
)
from tests.stores.redis_server import Server, running
from tests.stores.segments import index_of
from tests.stores.test_segment_processes import start_holder

ROOT = Path(__file__).parents[2]
PAGE_BYTES = SPACE.page_bytes
MIB = 2**20
WAIT_S = 60.0

Tool = Callable[..., str]

# A process that has a store open, and reads all of it when it is told to end.
ENGINE = """
import asyncio, sys
from asyncache.stores import SegmentStore, Status
from asyncache.testing._samples import LARGE_SPACE, SPACE, new_keys, new_source

async def main():
    async with SegmentStore(sys.argv[1], 1 << 23, segment_bytes=1 << 20) as store:
        keys = [*new_keys(20), *new_keys(2, LARGE_SPACE)]
        pages = [new_source(key) for key in keys]
        assert set(await store.put(keys, pages)) == {Status.HIT}
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(set(await store.get_into(keys, pages)), store.num_bytes, flush=True)

asyncio.run(main())
"""


def files(directory: Path, **options: bool) -> FileStore:
    return FileStore(directory, **options)


def segments(directory: Path, **options: bool) -> SegmentStore:
    return SegmentStore(directory, 8 * MIB, segment_bytes=MIB, **options)


FORMATS = {"files": _directory.FORMAT, "segments": _segment_directory.FORMAT}
KINDS = {"files": files, "segments": segments}
both = pytest.mark.parametrize("kind", KINDS)


def put(store: Store, keys: Sequence[PageKey]) -> None:
    async def run() -> None:
        async with store:
            statuses = await store.put(keys, [new_source(key) for key in keys])
            assert set(statuses) <= {Status.HIT}

    anyio.run(run)


def statuses_of(store: Store, keys: Sequence[PageKey]) -> list[Status]:
    async def run() -> list[Status]:
        async with store:
            return await store.get_into(keys, [new_target(key) for key in keys])

    return anyio.run(run)


def fill(kind: str, directory: Path) -> list[PageKey]:
    """Make a store of three spaces; return its pages."""
    keys = [*new_keys(5), *new_keys(3, OTHER_SPACE), *new_keys(2, LARGE_SPACE)]
    put(KINDS[kind](directory), keys)
    return keys


def path_of(directory: Path, key: PageKey) -> Path:
    name = key.hash.hex()
    return directory / key.space.name / name[-2:] / f"{name}.kv"


def spoil(kind: str, directory: Path, key: PageKey) -> None:
    """Flip a bit in the bytes of a page."""
    source = bytes(new_source(key)[0])
    paths = [path_of(directory, key)] if kind == "files" else directory.glob("*.seg")
    for path in paths:
        data = path.read_bytes()
        if source in data:
            at = data.index(source) + len(source) // 2
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            return
    raise AssertionError("the page is nowhere")


def look_at(directory: Path) -> dict[str, object]:
    """Return all that is in a directory, and in its index.

    But for SQLite's logs, and the number of commits, be they of nothing.
    """
    found: dict[str, object] = {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if not path.name.startswith(("index.db", "lock"))
    }
    if (directory / "index.db").exists():
        with index_of(directory) as index:
            found["index"] = list(index.iterdump())
    return found


@pytest.fixture
def store(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Return a function that runs a command and returns what it printed."""

    def run(*words: object, code: int = 0) -> str:
        assert main(["store", *map(str, words)]) == code
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture
def told(store: Tool) -> Callable[..., dict]:
    """Return the same for JSON."""

    def run(*words: object, code: int = 0) -> dict:
        out = store(*words, "--json", code=code)
        assert out.count("\n") == 1
        return json.loads(out)

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Return a function that runs a command and returns the line that refused it."""

    def run(*words: object) -> str:
        try:
            code = main(["store", *map(str, words)])
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("asyncache")
        assert err.count("\n") == 1
        return err

    return run


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def tool(*words: object, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "asyncache", "store", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **options)


# Looking.


@both
def test_each_page_has_a_line(tmp_path, store, kind):
    keys = fill(kind, tmp_path)
    lines = store("ls", tmp_path).splitlines()
    assert sorted(lines) == sorted(
        f"{key.hash.hex()} {key.space.name} {key.space.page_bytes}" for key in keys
    )
    some = store("ls", tmp_path, "--space", SPACE.name).splitlines()
    assert len(some) == 5
    assert set(some) <= set(lines)
    assert len(store("ls", tmp_path, "--limit", 3).splitlines()) == 3
    assert store("ls", tmp_path, "--limit", 0) == ""
    rows = [json.loads(line) for line in store("ls", tmp_path, "--json").splitlines()]
    assert {tuple(row) for row in rows} == {("hash", "space", "bytes")}
    assert {row["hash"] for row in rows} == {key.hash.hex() for key in keys}


@both
def test_pages_are_counted_by_space(tmp_path, store, told, kind):
    keys = fill(kind, tmp_path)
    found = told("stat", tmp_path)
    rows = {row.pop("space"): row for row in found.pop("spaces")}
    assert rows == {
        SPACE.name: {"pages": 5, "bytes": 5 * PAGE_BYTES},
        OTHER_SPACE.name: {"pages": 3, "bytes": 3 * OTHER_SPACE.page_bytes},
        LARGE_SPACE.name: {"pages": 2, "bytes": 2 * LARGE_SPACE.page_bytes},
    }
    assert found.pop("free_bytes") > 0
    is_segments = kind == "segments"
    assert found == {
        "place": str(tmp_path),
        "kind": kind,
        "format": int(re.search(r"[0-9]+$", str(FORMATS[kind]))[0]),
        "pages": 10,
        "bytes": sum(key.space.page_bytes for key in keys),
        "capacity_bytes": 8 * MIB if is_segments else None,
        "claims": 0 if is_segments else None,
        "dead_claims": 0 if is_segments else None,
    }
    lines = store("stat", tmp_path).splitlines()
    assert "pages: 10" in lines
    assert f"{SPACE.name}: 5 pages, {5 * PAGE_BYTES} bytes" in lines
    assert ("claims: 0" in lines) is is_segments


@both
def test_looking_changes_nothing(tmp_path, store, kind):
    keys = fill(kind, tmp_path)
    put(KINDS[kind](tmp_path, checksums=False), new_keys(2))
    if kind == "files":
        dead = tmp_path / "tmp" / "dead"
        dead.write_text("half a page")
        os.utime(dead, (0, 0))
    before = look_at(tmp_path)
    for command in ("ls", "stat", "verify", "gc", "ls", "verify"):
        if command != "gc" or kind == "segments":
            store(command, tmp_path)
            assert look_at(tmp_path) == before
    store("export", tmp_path, tmp_path.parent / f"{tmp_path.name}.tar")
    assert look_at(tmp_path) == before
    assert statuses_of(KINDS[kind](tmp_path), keys) == [Status.HIT] * 10


@both
def test_good_pages_are_verified(tmp_path, store, told, kind):
    fill(kind, tmp_path)
    put(KINDS[kind](tmp_path, checksums=False), new_keys(2))
    num_bytes = 7 * PAGE_BYTES + 3 * OTHER_SPACE.page_bytes + 2 * LARGE_SPACE.page_bytes
    assert told("verify", tmp_path) == {
        "place": str(tmp_path),
        "pages": 12,
        "bytes": num_bytes,
        "good": 10,
        "without_digests": 2,
        "corrupt": 0,
        "gone": 0,
        "unanswered": 0,
        "too_large": 0,
    }
    text = store("verify", tmp_path)
    assert text == f"12 pages, {num_bytes} bytes: 10 good, 2 without digests\n"
    assert told("verify", tmp_path, "--space", OTHER_SPACE.name)["good"] == 3


@both
def test_a_corrupt_page_is_told_and_removed(tmp_path, store, told, kind):
    keys = fill(kind, tmp_path)
    spoil(kind, tmp_path, keys[0])
    spoil(kind, tmp_path, keys[-1])
    text = store("verify", tmp_path, code=1)
    assert text.endswith(": 8 good, 2 corrupt and removed\n")
    found = told("verify", tmp_path)
    assert (found["good"], found["corrupt"]) == (8, 0)


@both
def test_many_small_batches_are_as_good_as_a_large_one(
    tmp_path, told, kind, monkeypatch
):
    monkeypatch.setattr("asyncache.cli._store_pages.BATCH_PAGES", 2)
    monkeypatch.setattr("asyncache.cli._store_pages.BATCH_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr("asyncache.cli._store_import.BATCH_PAGES", 2)
    fill(kind, tmp_path / "a")
    assert told("verify", tmp_path / "a")["good"] == 10
    told("export", tmp_path / "a", tmp_path / "a.tar")
    found = told("import", tmp_path / "a.tar", tmp_path / "b", "--create", "files")
    assert found["new"] == 10


def test_a_page_that_goes_meanwhile_is_told(tmp_path, told, monkeypatch):
    keys = new_keys(3)
    put(files(tmp_path), keys)
    look = FileStore.get_into

    async def get_late(self, *arguments):
        page = path_of(tmp_path, keys[0])
        await anyio.to_thread.run_sync(lambda: page.unlink(missing_ok=True))
        return await look(self, *arguments)

    monkeypatch.setattr(FileStore, "get_into", get_late)
    found = told("verify", tmp_path)
    assert (found["good"], found["gone"]) == (2, 1)


def test_a_claim_of_a_million_layers_is_skipped(tmp_path, told):
    put(files(tmp_path), new_keys(1))
    name = "0" * 64
    path = tmp_path / f"kv-all-uint8-{10**8}x1" / "00" / f"{name}.kv"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(-(-(32 + 8 * (10**8 + 1)) // 64) * 64 + 10**8)
    found = told("verify", tmp_path)
    assert (found["good"], found["too_large"]) == (1, 1)
    told("export", tmp_path, tmp_path / "a.tar")


# Tidying up.


def test_garbage_of_files_is_given_back(tmp_path, store, told):
    keys = new_keys(3)
    put(files(tmp_path), keys)
    os.truncate(path_of(tmp_path, keys[0]), 100)
    assert told("gc", tmp_path) == {"place": str(tmp_path), "freed_bytes": 100}
    assert store("gc", tmp_path) == "0 bytes freed\n"
    assert statuses_of(files(tmp_path), keys[1:]) == [Status.HIT] * 2


def test_what_a_dead_engine_claimed_is_given_back(tmp_path, store, told):
    holder = start_holder(tmp_path)
    assert told("stat", tmp_path)["claims"] == 1
    assert store("gc", tmp_path) == "0 bytes freed\n"
    holder.kill()
    holder.communicate()
    assert told("stat", tmp_path)["dead_claims"] == 1
    assert store("gc", tmp_path) == "4096 bytes freed\n"
    assert told("stat", tmp_path)["dead_claims"] == 0


def test_all_works_beside_a_running_engine(tmp_path, told, store):
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path / "s")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdout.readline() == "open\n"
        assert len(store("ls", tmp_path / "s").splitlines()) == 22
        assert told("stat", tmp_path / "s")["capacity_bytes"] == 8 * MIB
        assert told("verify", tmp_path / "s")["good"] == 22
        assert told("gc", tmp_path / "s")["freed_bytes"] == 0
        assert told("export", tmp_path / "s", tmp_path / "a.tar")["good"] == 22
        found = told("import", tmp_path / "a.tar", tmp_path / "s")
        assert found["there_already"] == 22
        out, _ = engine.communicate("\n", timeout=WAIT_S)
        assert out == f"{{<Status.HIT: 1>}} {8 * MIB}\n"
    finally:
        engine.kill()
        engine.communicate()
    assert told("verify", tmp_path / "s")["good"] == 22


# Places.


def test_a_place_that_is_no_store_is_refused(tmp_path, refused):
    (tmp_path / "file").write_text("")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "asyncache.json").write_text("nonsense")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "asyncache.json").write_text('{"format": 99}')
    before = look_at(tmp_path)
    for command in (["ls"], ["stat"], ["verify"], ["gc"], ["export"]):
        rest = [tmp_path / "a.tar"] if command == ["export"] else []
        for name, why in {
            "absent": "holds no store: it has no asyncache.json",
            "file": "holds no store",
            "bad": "asyncache.json is no store's: b'nonsense'",
            "new": f"holds files of format 99, not files of format {FORMATS['files']}",
        }.items():
            error = refused(*command, tmp_path / name, *rest)
            assert f"error: {tmp_path / name}: " in error
            assert why in error
    assert look_at(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("ls", "arguments are required: PLACE"),
        ("look x", "invalid choice: 'look'"),
        ("", "arguments are required: COMMAND"),
        ("ls x --space kv", "argument --space: 'kv' is no space's name"),
        ("ls x --limit -1", "argument --limit: '-1' is not an int from 0 on"),
        ("ls x --prefix p", "--prefix is for servers and buckets, and x is a"),
        ("ls redis://x --prefix *", "--prefix: prefix must match"),
        ("ls redis://", "redis://: "),
        ("ls redis://u:secret@h:p", "redis://h:p: cannot read the url: write redis://"),
        (
            "ls redis://h?password=secret&x=1",
            "redis://h: the url has an unknown option",
        ),
        ("ls nothing://x", "nothing://x: "),
        ("export x - --json", "--json and FILE - do not go together"),
        ("import x y --create segments", "--create segments needs --max-bytes"),
        ("import x y --max-bytes 1G", "--max-bytes needs --create segments"),
        ("import x y --segment-bytes 1G --create files", "--segment-bytes needs"),
        ("import x y --create segments --max-bytes 1X", "'1X' is not bytes, such as"),
        (
            "import /dev/null y --create segments --max-bytes 1K",
            "must hold a segment of",
        ),
        ("import x redis://y --create files", "--create makes a directory, not redis:"),
        ("import x y --create boxes", "invalid choice: 'boxes'"),
    ],
)
def test_what_cannot_be_is_refused(refused, words, why):
    error = refused(*words.split())
    assert why in error
    assert "secret" not in error


def test_a_new_store_is_made_only_where_nothing_is(tmp_path, refused, told):
    fill("files", tmp_path / "a")
    told("export", tmp_path / "a", tmp_path / "a.tar")
    before = look_at(tmp_path)
    for kind in (["files"], ["segments", "--max-bytes", "8G"]):
        words = ["import", tmp_path / "a.tar", tmp_path / "a", "--create", *kind]
        assert f"and {tmp_path / 'a'} is not empty" in refused(*words)
    assert look_at(tmp_path) == before


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "export", "import"])
def test_a_broken_index_is_told_and_left_alone(tmp_path, refused, told, command):
    fill("files", tmp_path / "f")
    archive = tmp_path / "a.tar"
    told("export", tmp_path / "f", archive)
    fill("segments", tmp_path / "s")
    index = tmp_path / "s" / "index.db"
    index.write_bytes(b"\xff" * index.stat().st_size)
    before = {path: path.read_bytes() for path in (tmp_path / "s").glob("*.*")}
    words = {"export": [tmp_path / "s", archive], "import": [archive, tmp_path / "s"]}
    error = refused(command, *words.get(command, [tmp_path / "s"]))
    assert f"the index of {tmp_path / 's'} is broken" in error
    assert {path: path.read_bytes() for path in before} == before
    assert not list((tmp_path / "s").glob("broken-*"))


# Servers.


def test_a_server_is_looked_after(tmp_path, told, store, server):
    keys = [*new_keys(3), *new_keys(1, LARGE_SPACE)]
    url = server.url
    put(RedisStore(url, prefix="one"), keys)
    put(RedisStore(url, prefix="two"), keys[:1])
    one, two = (url, "--prefix", "one"), (url, "--prefix", "two")
    assert len(store("ls", *one).splitlines()) == 4
    assert store("ls", server.unix_url, "--prefix", "two").count("\n") == 1
    found = told("stat", *one)
    assert (found["kind"], found["format"], found["pages"]) == ("redis", None, 4)
    assert "free bytes" not in store("stat", *one)
    assert told("gc", *two)["freed_bytes"] == 0
    server.ask("SETRANGE", f"one:{SPACE.name}:{keys[0].hash.hex()}", "300", "rotten")
    found = told("verify", *one, code=1)
    assert (found["good"], found["corrupt"]) == (3, 1)
    told("export", *one, tmp_path / "a.tar")
    assert told("import", tmp_path / "a.tar", *two)["new"] == 3
    assert told("verify", *two)["good"] == 4
    words = ["import", tmp_path / "a.tar", tmp_path / "f", "--create", "files"]
    assert told(*words)["new"] == 3
    assert statuses_of(files(tmp_path / "f"), keys[1:]) == [Status.HIT] * 3


def test_pages_without_digests_are_refused_where_there_must_be_some(
    tmp_path, told, server
):
    put(files(tmp_path / "f", checksums=False), new_keys(2))
    assert told("export", tmp_path / "f", tmp_path / "a.tar")["without_digests"] == 2
    found = told("import", tmp_path / "a.tar", server.url, code=1)
    assert (found["refused"], found["new"]) == (2, 0)


def test_a_server_that_is_away_is_told(tmp_path, refused, store, capsys):
    with running() as server:
        url = server.url
    fill("files", tmp_path / "f")
    archive = tmp_path / "a.tar"
    store("export", tmp_path / "f", archive)
    for words in (["ls"], ["stat"], ["verify"]):
        assert f"error: {url}: " in refused(*words, url)
    assert main(["store", "import", str(archive), url]) == 2
    out, err = capsys.readouterr()
    assert out == "10 pages: 10 unanswered\n"
    assert err.endswith(f"error: {url}: the store did not answer for 10 pages\n")


def test_pages_that_a_server_does_not_give_are_told(
    tmp_path, capsys, server, monkeypatch
):
    put(RedisStore(server.url, prefix="mute"), new_keys(2))

    async def mute(self, keys, targets):
        return [Status.UNAVAILABLE] * len(keys)

    monkeypatch.setattr(RedisStore, "get_into", mute)
    for command, rest in (("verify", []), ("export", [tmp_path / "a.tar"])):
        words = [command, server.url, *rest, "--prefix", "mute"]
        assert main(["store", *map(str, words)]) == 2
        assert "did not answer for 2 pages" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_is_looked_after(tmp_path, store, told, refused):
    pytest.importorskip("obstore")
    keys = fill("files", tmp_path / "f")
    told("export", tmp_path / "f", tmp_path / "a.tar")
    (tmp_path / "b").mkdir()
    url = f"file://{tmp_path / 'b'}"
    assert told("import", tmp_path / "a.tar", url)["new"] == 10
    assert told("import", tmp_path / "a.tar", url, "--prefix", "x")["new"] == 10
    assert len(store("ls", url, "--space", SPACE.name).splitlines()) == 5
    found = told("stat", url)
    assert (found["kind"], found["pages"], found["format"]) == ("objects", 10, None)
    assert told("verify", url, "--prefix", "x")["good"] == 10
    assert told("gc", url)["freed_bytes"] == 0
    told("export", url, tmp_path / "b.tar")
    told("import", tmp_path / "b.tar", tmp_path / "g", "--create", "files")
    assert statuses_of(files(tmp_path / "g"), keys) == [Status.HIT] * 10
    assert "--prefix: prefix must match" in refused("gc", url, "--prefix", "/")
    error = refused("ls", f"file://{tmp_path}/absent")
    assert f"error: file://{tmp_path}/absent: cannot open" in error
    assert not (tmp_path / "absent").exists()


# Archives.


@pytest.mark.parametrize("plain", [False, True])
def test_pages_come_back_bit_for_bit_over_the_other_kind(tmp_path, told, plain):
    fill("files", tmp_path / "f")
    if plain:
        put(files(tmp_path / "f", checksums=False), new_keys(3))
    num_pages = 10 + 3 * plain
    told("export", tmp_path / "f", tmp_path / "f.tar")
    new = ["--create", "segments", "--max-bytes", "8M", "--segment-bytes", "1M"]
    found = told("import", tmp_path / "f.tar", tmp_path / "s", *new)
    assert found["new"] == num_pages
    assert told("export", tmp_path / "s", tmp_path / "s.tar")["good"] == 10
    told("import", tmp_path / "s.tar", tmp_path / "g", "--create", "files")
    shutil.rmtree(tmp_path / "f" / "tmp")
    shutil.rmtree(tmp_path / "g" / "tmp", ignore_errors=True)
    pages = {
        name: page
        for name, page in look_at(tmp_path / "f").items()
        if name.endswith(".kv")
    }
    assert len(pages) == num_pages
    assert pages.items() <= look_at(tmp_path / "g").items()
    found = told("verify", tmp_path / "g")
    assert (found["good"], found["without_digests"]) == (10, 3 * plain)


def test_an_archive_is_a_tar_file_that_feeds_a_store_of_files(tmp_path, told, store):
    keys = fill("segments", tmp_path / "s")
    store("export", tmp_path / "s", tmp_path / "a.tar")
    assert (tmp_path / "a.tar").stat().st_mode & 0o777 == 0o600
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path / "f", filter="data")
    assert statuses_of(files(tmp_path / "f"), keys) == [Status.HIT] * 10
    with tarfile.open(tmp_path / "b.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(tmp_path / "f", arcname=".")
    new = told("import", tmp_path / "b.tar", tmp_path / "g", "--create", "files")
    assert (new["new"], new["bad"]) == (10, 0)
    assert new["foreign"] > 0


def test_long_names_are_read_in_every_format(tmp_path, told):
    from asyncache.core import PageSpace

    space = PageSpace("k" * 32, "0of1", "uint8", (2, *[1] * 60, 8))
    put(files(tmp_path / "f"), new_keys(2, space))
    told("export", tmp_path / "f", tmp_path / "0.tar")
    for number, form in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT), 1):
        with tarfile.open(tmp_path / f"{number}.tar", "w", format=form) as archive:
            archive.add(tmp_path / "f" / space.name, arcname=space.name)
    for number in range(3):
        words = [tmp_path / f"{number}.tar", tmp_path / f"g{number}"]
        assert told("import", *words, "--create", "files")["new"] == 2


def test_pages_that_are_there_are_not_put_again(tmp_path, store, told):
    fill("files", tmp_path / "f")
    store("export", tmp_path / "f", tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[:-1024] + data)  # each of them twice
    words = ["import", tmp_path / "a.tar", tmp_path / "g"]
    assert store(*words, "--create", "files") == "20 pages: 10 new, 10 there already\n"
    assert store(*words) == "20 pages: 20 there already\n"
    found = told(*words)
    assert found == {
        "file": str(tmp_path / "a.tar"),
        "place": str(tmp_path / "g"),
        "new": 0,
        "there_already": 20,
        "refused": 0,
        "bad": 0,
        "unanswered": 0,
        "foreign": 0,
    }


def test_what_has_no_room_is_told(tmp_path, told):
    fill("files", tmp_path / "f")
    told("export", tmp_path / "f", tmp_path / "a.tar")
    new = ["--create", "segments", "--max-bytes", "64K", "--segment-bytes", "16K"]
    found = told("import", tmp_path / "a.tar", tmp_path / "s", *new, code=1)
    assert (found["new"], found["refused"]) == (8, 2)  # the large ones


def test_an_import_keeps_to_the_bound_that_engines_gave_the_directory(
    tmp_path, store, told
):
    put(files(tmp_path / "a"), new_keys(40))
    told("export", tmp_path / "a", tmp_path / "a.tar")
    [old] = new_keys(1)
    file_bytes = next((tmp_path / "a").rglob("*.kv")).stat().st_size
    bounded = FileStore(tmp_path / "b", 16 * file_bytes)
    put(bounded, [old])
    assert told("stat", tmp_path / "b")["capacity_bytes"] == 16 * file_bytes
    assert told("import", tmp_path / "a.tar", tmp_path / "b")["new"] == 40
    assert 8 <= len(list((tmp_path / "b").rglob("*.kv"))) <= 17
    # Looking at pages is no use of them.
    paths = [tmp_path / "b" / "room", *(tmp_path / "b").rglob("*.kv")]
    for path in paths:
        os.utime(path, (1000, 1000))
    store("verify", tmp_path / "b")
    assert {path.stat().st_mtime for path in paths} == {1000}


def test_one_space_may_be_exported_alone(tmp_path, store):
    fill("segments", tmp_path / "s")
    words = ["export", tmp_path / "s", tmp_path / "a.tar", "--space", SPACE.name]
    assert store(*words) == "5 pages: 5 good\n"
    words = ["export", tmp_path / "s", tmp_path / "a.tar", "--space", "kv-all-uint8-3"]
    assert store(*words) == "0 pages: none\n"
    words = ["import", tmp_path / "a.tar", tmp_path / "f", "--create", "files"]
    assert store(*words) == "0 pages: none\n"


def test_a_corrupt_page_is_not_exported(tmp_path, told):
    keys = fill("files", tmp_path / "f")
    spoil("files", tmp_path / "f", keys[0])
    found = told("export", tmp_path / "f", tmp_path / "a.tar", code=1)
    assert (found["good"], found["corrupt"]) == (9, 1)
    assert found["bytes"] == (tmp_path / "a.tar").stat().st_size


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("no/a.tar", "No such file or directory"),
        (".", "no regular file; write - for stdout"),
        ("pipe", "no regular file; write - for stdout"),
    ],
)
def test_a_file_that_cannot_be_written_is_told(tmp_path, refused, file, why):
    fill("files", tmp_path / "f")
    os.mkfifo(tmp_path / "pipe")
    before = look_at(tmp_path / "f"), sorted(tmp_path.iterdir())
    error = refused("export", tmp_path / "f", tmp_path / file)
    assert f"error: {tmp_path / file}: {why}" in error
    assert (look_at(tmp_path / "f"), sorted(tmp_path.iterdir())) == before


def test_a_full_disk_is_told(tmp_path, refused):
    from tests.stores.mounts import mounted

    put(files(tmp_path / "f"), new_keys(20, LARGE_SPACE))
    with mounted(tmp_path / "small", "size=1m"):
        (tmp_path / "small" / "a.tar").write_text("the old one")
        error = refused("export", tmp_path / "f", tmp_path / "small" / "a.tar")
        assert "No space left on device" in error
        assert (tmp_path / "small" / "a.tar").read_text() == "the old one"
        assert len(list((tmp_path / "small").iterdir())) == 1


def test_a_terminal_gets_no_archive(tmp_path, refused, monkeypatch):
    fill("files", tmp_path / "f")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "stdout is a terminal" in refused("export", tmp_path / "f", "-")


# The process.


def test_an_archive_goes_through_a_pipe(tmp_path):
    keys = fill("files", tmp_path / "f")
    big = new_keys(40, LARGE_SPACE)  # more than a pipe holds
    put(files(tmp_path / "f"), big)
    source = tool("export", tmp_path / "f", "-", stdout=subprocess.PIPE)
    target = tool(
        *("import", "-", tmp_path / "s", "--create", "segments"),
        *("--max-bytes", "16M", "--segment-bytes", "1M", "--json"),
        stdin=source.stdout,
        stdout=subprocess.PIPE,
    )
    source.stdout.close()
    out, err = target.communicate(timeout=WAIT_S)
    assert (target.returncode, err) == (0, b"")
    assert json.loads(out)["new"] == 50
    assert source.wait(WAIT_S) == 0
    assert source.stderr.read() == b"50 pages: 50 good\n"
    source.stderr.close()
    there = statuses_of(SegmentStore(tmp_path / "s", None), [*keys, *big])
    assert there == [Status.HIT] * 50


def test_who_reads_no_more_ends_an_export(tmp_path):
    put(files(tmp_path / "f"), new_keys(10, LARGE_SPACE))
    source = tool("export", tmp_path / "f", "-", stdout=subprocess.PIPE)
    assert len(source.stdout.read(1000)) == 1000
    source.stdout.close()
    assert source.wait(WAIT_S) == 141
    assert source.stderr.read() == b""
    source.stderr.close()


def test_who_reads_no_more_ends_a_listing(tmp_path):
    put(files(tmp_path / "f"), new_keys(1000))  # more lines than a pipe holds
    source = tool("ls", tmp_path / "f", stdout=subprocess.PIPE)
    assert len(source.stdout.read(1000)) == 1000
    source.stdout.close()
    assert source.wait(WAIT_S) == 141
    assert source.stderr.read() == b""
    source.stderr.close()


def test_ctrl_c_ends_an_export_that_nobody_reads(tmp_path):
    put(files(tmp_path / "f"), new_keys(10, LARGE_SPACE))
    source = tool("export", tmp_path / "f", "-", stdout=subprocess.PIPE)
    assert len(source.stdout.read(1000)) == 1000
    source.send_signal(signal.SIGINT)
    assert source.wait(WAIT_S) == 130
    assert source.stderr.read() == b""
    source.stderr.close()
    source.stdout.close()


def test_ctrl_c_in_the_middle_of_an_export_leaves_the_old_file(
    tmp_path, capsys, monkeypatch
):
    fill("files", tmp_path / "f")
    read_pages, seen = export_room.read_pages, []

    async def interrupted(*arguments):
        async for pages in read_pages(*arguments):
            yield pages
        seen.extend(await anyio.to_thread.run_sync(os.listdir, tmp_path))
        signal.raise_signal(signal.SIGINT)
        await anyio.sleep_forever()

    monkeypatch.setattr(export_room, "read_pages", interrupted)
    (tmp_path / "a.tar").write_text("the old one")
    words = ["store", "export", tmp_path / "f", tmp_path / "a.tar"]
    assert main(list(map(str, words))) == 130
    assert capsys.readouterr() == ("", "")
    assert len(seen) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"f", "a.tar"}
    assert (tmp_path / "a.tar").read_text() == "the old one"


@both
def test_ctrl_c_in_the_middle_of_an_import_leaves_whole_pages(tmp_path, told, kind):
    put(files(tmp_path / "f"), new_keys(300))
    told("export", tmp_path / "f", tmp_path / "a.tar")
    put(KINDS[kind](tmp_path / "t"), [])
    target = tool("import", "-", tmp_path / "t", stdin=subprocess.PIPE)
    data = (tmp_path / "a.tar").read_bytes()
    target.stdin.write(data[:-3000])
    target.stdin.flush()
    deadline = time.monotonic() + WAIT_S
    while told("stat", tmp_path / "t")["pages"] < 256:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    target.send_signal(signal.SIGINT)
    _, err = target.communicate(timeout=WAIT_S)
    assert (target.returncode, err) == (130, b"")
    found = told("verify", tmp_path / "t")
    assert found["good"] == found["pages"] >= 256
    if kind == "segments":
        assert told("stat", tmp_path / "t")["dead_claims"] == 0
    assert told("import", tmp_path / "a.tar", tmp_path / "t")["new"] > 0


def test_a_bar_is_drawn_on_a_terminal_only(tmp_path, capsys, monkeypatch):
    pytest.importorskip("rich")
    fill("files", tmp_path / "f")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for words in (["stat", tmp_path / "f"], ["verify", tmp_path / "f"]):
        assert main(["store", *map(str, words), "--json"]) == 0
        out, err = capsys.readouterr()
        assert "pages/s, 0 failed" in err
        assert json.loads(out)["pages"] == 10
