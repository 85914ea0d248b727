"""Words: what streams wait for before the copies that they wait for have begun."""

from __future__ import annotations

from collections import deque

import pytest

from asyncache.core import ClosedError, DeviceError
from asyncache.devices._cuda_words import NUM_WORDS
from tests.cuda.scene import OUT_OF_MEMORY, Told, content, held
from tests.softcuda import Direction


@pytest.fixture
async def device(gpu):
    device = gpu.device(waits="words")
    yield device
    await device.aclose()


def value(device, word):
    """Return how high a word is, above where its user began."""
    return (int(device._words._values[word._index]) - word._base) % 2**32


async def passed(device, stream):
    """Return once a stream has run all that it was given."""
    told = Told()
    device.when_done(stream, told)
    await told.wait()


async def flush(device):
    """Return once all that was begun on the copy stream is over, and told."""
    await device.write_pages("kv", [4], memoryview(content()))


async def test_a_stream_waits_for_a_copy_that_has_yet_to_begin(gpu, softcuda, device):
    word, stream = device.new_word(), gpu.stream()
    word.hold(stream, 1)
    device.copy_pages("kv", [1], [2], stream=stream)
    await flush(device)
    assert not gpu.is_idle(stream)
    with softcuda.gate(Direction.HOST_TO_DEVICE) as gate:
        copy = device.start_write("kv", [1], memoryview(content()))
        copy.fence.raise_word(word, 1)
        gate.wait_held()
        assert not gpu.is_idle(stream)
    await passed(device, stream)
    assert held(device, [2]) == content()
    word.release()


async def test_a_stream_that_comes_late_does_not_wait(gpu, device):
    word, stream = device.new_word(), gpu.stream()
    word.set(2)
    word.hold(stream, 2)
    await passed(device, stream)
    word.hold(stream, 3)
    word.set(3)
    await passed(device, stream)
    word.release()


async def test_a_word_that_is_given_back_lets_go(gpu, device):
    word, stream = device.new_word(), gpu.stream()
    word.hold(stream, 3)
    await flush(device)
    assert not gpu.is_idle(stream)
    word.release()
    await passed(device, stream)
    word.hold(stream, 3)
    assert gpu.is_idle(stream)


async def test_a_word_stays_its_users_until_no_copy_raises_it(gpu, softcuda, device):
    word = device.new_word()
    index, base = word._index, word._base
    others = [device.new_word() for _ in range(NUM_WORDS - 1)]
    with softcuda.gate() as gate:
        copy = device.start_write("kv", [1], memoryview(content()))
        gate.wait_held()
        copy.fence.raise_word(word, 1)
        word.release()
        assert device.new_word() is None
    await flush(device)
    again = device.new_word()
    assert again._index == index
    assert again._base > base + 1
    assert value(device, again) == 0
    stream = gpu.stream()
    again.hold(stream, 1)
    await flush(device)
    assert not gpu.is_idle(stream)
    again.set(1)
    await passed(device, stream)
    for other in (*others, again):
        other.release()


async def test_a_late_copy_holds_no_stream_of_a_word_that_was_given_back(
    gpu, softcuda, device
):
    """The copy stream lowers the word after its release: it is raised once more."""
    word, stream = device.new_word(), gpu.stream()
    with softcuda.gate(Direction.OTHER) as forwards:
        device.copy_pages("kv", [2], [3], stream=stream)
        forwards.wait_held()
        word.hold(stream, 2)
        with softcuda.gate(Direction.HOST_TO_DEVICE) as loads:
            copy = device.start_write("kv", [1], memoryview(content()))
            loads.wait_held()
            copy.fence.raise_word(word, 1)
            word.release()
        await flush(device)
    await passed(device, stream)


async def test_a_word_only_rises(gpu, device):
    word = device.new_word()
    copy = device.start_write("kv", [1], memoryview(content()))
    copy.fence.raise_word(word, 2)
    await copy.wait()
    await flush(device)
    word.set(1)
    assert value(device, word) == 2
    word.release()


async def test_what_the_host_has_set_stays_whatever_the_copies_write(
    gpu, softcuda, device
):
    word, stream = device.new_word(), gpu.stream()
    with softcuda.gate() as gate:
        copy = device.start_write("kv", [1], memoryview(content()))
        copy.fence.raise_word(word, 1)
        gate.wait_held()
        word.set(3)
        assert value(device, word) == 3
    await copy.wait()
    await flush(device)
    assert value(device, word) == 3
    word.hold(stream, 3)
    await passed(device, stream)
    word.release()


async def test_a_word_goes_on_beyond_32_bits(gpu, device):
    start = 2**32 - 2
    device._words._free = deque([(7, start)])
    device._words._values[7] = start
    for _ in range(3):
        word, stream = device.new_word(), gpu.stream()
        for height in (1, 2, 3):
            word.hold(stream, height)
            await flush(device)
            assert not gpu.is_idle(stream)
            word.set(height)
            await passed(device, stream)
        word.hold(stream, 4)
        word.release()
        await passed(device, stream)
        await flush(device)


async def test_who_finds_no_word_left_gets_none(gpu, device):
    words = [device.new_word() for _ in range(NUM_WORDS)]
    assert device.new_word() is None
    words[5].release()
    words[5].release()
    await flush(device)
    assert device.new_word() is not None
    assert device.new_word() is None


async def test_a_word_that_was_given_back_is_not_touched_any_more(gpu, device):
    word = device.new_word()
    word.release()
    await flush(device)
    height = value(device, word)
    word.set(7)
    copy = device.start_write("kv", [1], memoryview(content()))
    copy.fence.raise_word(word, 7)
    await copy.wait()
    await flush(device)
    assert value(device, word) == height


async def test_a_word_may_outlive_its_device(gpu, device):
    word = device.new_word()
    await device.aclose()
    word.set(1)
    with pytest.raises(ClosedError):
        word.hold(gpu.stream(), 1)
    word.release()


async def test_a_refusal_ends_neither_the_word_nor_the_device(gpu, softcuda, device):
    word, stream = device.new_word(), gpu.stream()
    softcuda.refuse("cuStreamWaitValue32", OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=r"could not be told of a word: .*OUT_OF_MEM"):
        word.hold(stream, 1)
    copy = device.start_write("kv", [1], memoryview(content()))
    softcuda.refuse("cuStreamWriteValue32", OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match="could not be told of a word"):
        copy.fence.raise_word(word, 1)
    await copy.wait()
    assert device.failure is None
    word.hold(stream, 1)
    word.set(1)
    await passed(device, stream)
    word.release()


async def test_fences_are_all_there_is_unless_words_are_asked_for(gpu):
    device = gpu.device()
    assert device.new_word() is None
    await device.aclose()
