"""Archives from anywhere: what they claim is never believed, and leads nowhere."""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import anyio
import pytest
from hypothesis import given, strategies as st

from asyncache.cli import main
from asyncache.core import PageKey, PageSpace
from asyncache.stores import FileStore, Status, frame_bytes, frame_page
from asyncache.testing._samples import SPACE, content, new_keys, new_target

KEYS = new_keys(4)
BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)


def page_file(key: PageKey, *, checksums: bool = True) -> bytes:
    page = content(key)
    return frame_page(key, memoryview(page), checksums=checksums) + page


def name_of(key: PageKey) -> str:
    return f"{key.space.name}/{key.hash.hex()[-2:]}/{key.hash.hex()}.kv"


def member(
    name: str,
    data: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    size: int | None = None,
    link: str = "",
    form: int = tarfile.GNU_FORMAT,
) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(data) if size is None else size
    return info.tobuf(form) + data + bytes(-len(data) % BLOCK)


def record(name: bytes, value: bytes) -> bytes:
    body = b" " + name + b"=" + value + b"\n"
    size = len(body) + 1
    while len(b"%d" % size) + len(body) != size:
        size += 1
    return b"%d" % size + body


def pax(*records: bytes) -> bytes:
    return member("pax", b"".join(records), kind=tarfile.XHDTYPE)


GOOD = b"".join(member(name_of(key), page_file(key)) for key in KEYS)
PAGE = page_file(KEYS[0])


def run(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["store", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


class Outcome:
    """What came of importing an archive into a new store of files."""

    def __init__(self, folder: Path, archive: bytes) -> None:
        (folder / "a.tar").write_bytes(archive)
        words = ["import", folder / "a.tar", folder / "f", "--create", "files"]
        self.code, self.out, self.err = run(*words)
        self.names = {path.name for path in folder.iterdir()}
        self.files = {
            str(path.relative_to(folder / "f"))
            for path in (folder / "f").rglob("*")
            if not path.is_dir() or path.is_symlink()
        }
        self.statuses = anyio.run(self._read, folder / "f")

    @staticmethod
    async def _read(directory: Path) -> list[Status]:
        targets = [new_target(key) for key in KEYS]
        async with FileStore(directory, create=False) as store:
            statuses = await store.get_into(KEYS, targets)
        for key, status, [target] in zip(KEYS, statuses, targets, strict=True):
            assert status is not Status.HIT or target == content(key)
        return statuses

    @property
    def num_good(self) -> int:
        assert self.code in {0, 1, 2}
        assert (self.code == 2) == self.err.startswith("asyncache: error: ")
        assert self.err.count("\n") == (self.code == 2)
        assert self.names == {"a.tar", "f"}
        assert Status.CORRUPT not in self.statuses
        good = self.statuses.count(Status.HIT)
        assert len(self.files) == 1 + good  # and the control file
        return good


@pytest.fixture
def bring(tmp_path) -> Callable[[bytes], Outcome]:
    return lambda archive: Outcome(tmp_path, archive)


def test_a_good_archive_comes_in(bring):
    outcome = bring(GOOD + END)
    assert (outcome.code, outcome.num_good) == (0, 4)
    assert outcome.out == "4 pages: 4 new\n"


FOREIGN = {
    "a path that leads out": member("../../etc/passwd", b"x"),
    "a page whose path leads out": member(f"../{name_of(KEYS[0])}", PAGE),
    "an absolute page": member(f"/{name_of(KEYS[0])}", PAGE),
    "a page in a folder": member(f"x/{name_of(KEYS[0])}", PAGE),
    "a page in a folder of another name": member(
        f"{SPACE.name}/zz/{KEYS[0].hash.hex()}.kv", PAGE
    ),
    "a symbolic link": member(
        name_of(KEYS[0]), kind=tarfile.SYMTYPE, link="/etc/passwd"
    ),
    "a hard link that claims bytes": member(
        name_of(KEYS[0]), kind=tarfile.LNKTYPE, link="/etc/passwd", size=2**40
    ),
    "a device": member(name_of(KEYS[0]), kind=tarfile.CHRTYPE),
    "a pipe": member(name_of(KEYS[0]), kind=tarfile.FIFOTYPE),
    "a folder": member(name_of(KEYS[0]), kind=tarfile.DIRTYPE),
    "what nobody knows": member(name_of(KEYS[0]), PAGE, kind=b"Z"),
    "the control file": member("asyncache.json", b'{"format": 9}'),
    "a space that is none": member(f"kv-all-object-2/{'0' * 64}.kv", b"x"),
    "a name with a zero": member(f"{SPACE.name}\0/{KEYS[0].hash.hex()}.kv", PAGE),
    "a name that is not UTF-8": member("\udcff\udcfe", b"x"),
    "a global header": member("g", record(b"path", b"x"), kind=tarfile.XGLTYPE),
    "a page that a header calls otherwise": pax(record(b"path", b"../x"))
    + member(name_of(KEYS[0]), PAGE),
    "a long name of another": member("L", b"../x\0", kind=tarfile.GNUTYPE_LONGNAME)
    + member(name_of(KEYS[0]), PAGE),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_no_page_is_skipped(bring, what):
    outcome = bring(FOREIGN[what] + GOOD + END)
    assert (outcome.code, outcome.num_good) == (0, 4)
    expected = "" if "global" in what else "; 1 members are no pages"
    assert outcome.out == f"4 pages: 4 new{expected}\n"


HUGE = PageSpace("kv", "all", "uint8", (2**40, 2**40))
LAYERS = PageSpace("kv", "all", "uint8", (10**7, 1))
BAD = {
    "too short": member(name_of(KEYS[0]), PAGE[:-1]),
    "too long": member(name_of(KEYS[0]), PAGE + b"x"),
    "empty": member(name_of(KEYS[0])),
    "another page's": member(name_of(KEYS[0]), page_file(KEYS[1])),
    "of zeros": member(name_of(KEYS[0]), bytes(len(PAGE))),
    "of a space of too many bytes": member(
        f"{HUGE.name}/{'0' * 64}.kv", b"x", form=tarfile.PAX_FORMAT
    ),
    "of too many layers": member(
        f"{LAYERS.name}/{'0' * 64}.kv", bytes(frame_bytes(LAYERS))
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_page_that_is_none_is_told_and_not_put(bring, what):
    outcome = bring(BAD[what] + GOOD + END)
    assert (outcome.code, outcome.num_good) == (1, 4)
    assert outcome.out == "5 pages: 4 new, 1 bad\n"


def broken(block: bytes) -> bytes:
    return block[:200] + b"!" + block[201:]


NEGATIVE = member("x", size=0)
NEGATIVE = NEGATIVE[:124] + b"\xff" * 12 + NEGATIVE[136:]


def with_sum(block: bytes) -> bytes:
    """Return a header with the right checksum, whatever else is in it."""
    total = sum(block[:148]) + 8 * 32 + sum(block[156:BLOCK])
    return block[:148] + b"%06o\0 " % total + block[156:]


ENDS = {
    "nothing": b"",
    "text": b"no archive\n" * 100,
    "a broken header": broken(member("x")),
    "a negative size": with_sum(NEGATIVE),
    "a size of years": member("x", size=2**62),
    "a page of years": member(name_of(KEYS[0]), size=2**62),
    "a size of no number": pax(record(b"size", b"-5")) + member("x"),
    "a size that a header makes years": pax(record(b"size", b"9" * 18)) + member("x"),
    "a header of years": member("x", kind=tarfile.XHDTYPE, size=2**62),
    "a long name of years": member("x", kind=tarfile.GNUTYPE_LONGNAME, size=2**62),
    "a record of nothing": pax(b"nonsense"),
    "a record of length 0": pax(b"0 a=b\n"),
    "a record that is its own beginning": pax(b"2 a=b\n"),
    "a record that ends elsewhere": pax(b"99 a=b\n"),
    "a record of a long number": pax(b"9" * 5000 + b" a=b\n"),
    "no end": b"",
}


@pytest.mark.parametrize("what", ENDS)
def test_an_archive_that_goes_wrong_is_told_and_what_came_before_is_kept(bring, what):
    outcome = bring(GOOD + ENDS[what])
    assert (outcome.code, outcome.num_good) == (2, 4)
    assert "a.tar: no archive of pages: byte " in outcome.err
    assert len(outcome.err) < 1000


def test_any_number_of_headers_takes_no_memory(bring):
    big = pax(*[record(b"%d" % number, b"x" * 1000) for number in range(500)])
    outcome = bring(big * 20 + GOOD + END)
    assert (outcome.code, outcome.num_good) == (0, 4)


def test_many_small_records_take_no_time(bring):
    big = pax(record(b"a", b"") * 170_000)
    outcome = bring(big + GOOD + END)
    assert (outcome.code, outcome.num_good) == (0, 4)


def test_a_page_may_lie_beside_the_others_of_its_space(bring):
    names = [f"{key.space.name}/{key.hash.hex()}.kv" for key in KEYS]
    names[1:] = [f"./././{names[1]}", name_of(KEYS[2]), f"./{name_of(KEYS[3])}"]
    pages = [member(n, page_file(k)) for n, k in zip(names, KEYS, strict=True)]
    outcome = bring(b"".join(pages) + END)
    assert (outcome.code, outcome.num_good) == (0, 4)


def test_an_archive_may_end_in_the_middle_of_its_end(bring):
    outcome = bring(GOOD + END[:BLOCK])
    assert (outcome.code, outcome.num_good) == (0, 4)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder / "x", ignore_errors=True)
    (folder / "x").mkdir()
    return folder / "x"


@given(cut=st.integers(0, len(GOOD)))
def test_half_an_archive_brings_whole_pages(folder, cut):
    outcome = Outcome(emptied(folder), GOOD[:cut])
    assert outcome.code == 2
    whole = [len(GOOD) // 4 * number + BLOCK + len(PAGE) for number in range(4)]
    assert outcome.num_good == sum(cut >= end for end in whole)


@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(GOOD + END) - 1), st.integers(1, 255)),
        min_size=1,
        max_size=6,
    )
)
def test_no_flipped_bits_get_a_wrong_page_in(folder, flips):
    archive = bytearray(GOOD + END)
    for at, change in flips:
        archive[at] ^= change
    assert Outcome(emptied(folder), bytes(archive)).num_good <= 4


@given(st.lists(st.sampled_from([*FOREIGN.values(), *BAD.values(), *ENDS.values()])))
def test_no_mixture_does_any_harm(folder, parts):
    archive = b"".join(part for part in parts if len(part) < 2**20)
    assert Outcome(emptied(folder), archive + GOOD + END).num_good in {0, 4}


def test_an_archive_that_cannot_be_read_is_told(tmp_path):
    for name, why in ((".", "Is a directory"), ("absent", "No such file")):
        words = ["import", tmp_path / name, tmp_path / "f", "--create", "files"]
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert err.startswith(f"asyncache: error: {tmp_path / name}: {why}")
        assert list(tmp_path.iterdir()) == []


def test_stdin_is_an_archive(tmp_path, monkeypatch):
    (tmp_path / "a.tar").write_bytes(GOOD + END)
    with (tmp_path / "a.tar").open("rb") as file:
        monkeypatch.setattr(sys, "stdin", file)
        code, out, _ = run("import", "-", tmp_path / "f", "--create", "files")
    assert (code, out) == (0, "4 pages: 4 new\n")
