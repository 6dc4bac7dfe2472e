"""Tokens without a page, from the page lists of both machines to the bytes of the pools."""

import numpy as np
import pytest

from pdxfer.errors import ConfigError, RemoteProtocolError, TransferError
from pdxfer.layout import Pages, page_major, plan, token_major
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.group_pages import pack_group, unpack_group
from pdxfer.protocol.state import State
from pdxfer.wire.messages import GroupPages
from tests.unit.protocol.test_machines import PAGE, Pair, layout

TOKENS = 5 * PAGE


def run(pair, source, destination, *, tokens=TOKENS, prefix=0):
    pair.receive()
    given = GivenPlaces({"full": destination}, tokens, prefix)
    pair.decode.machine.place(0, 0, given, now=pair.cluster.now)
    pair.decode.pump()
    pair.open()
    for number, listed in enumerate(source):
        last = number == len(source) - 1
        chunk = GivenChunk({"full": listed}, tokens=tokens, last=last)
        pair.prefill.machine.send(0, 0, chunk)
        pair.prefill.pump()
    pair.cluster.run()


def assert_moved(pair, moved):
    """Each pair (source page, destination page) has moved whole, and nothing else."""
    expected = [part.copy() for part in pair.before]
    source, destination = (node.machine.workers[0].layout for node in (pair.prefill, pair.decode))
    for from_page, to_page in moved:
        for row in range(PAGE):
            for part in "kv":
                for layer in range(3):
                    for head in range(2):
                        region, at = source.locate(part, layer, from_page * PAGE + row, head)
                        cell = pair.prefill.memory[0][region][at : at + 16]
                        region, at = destination.locate(part, layer, to_page * PAGE + row, head)
                        expected[region][at : at + 16] = cell
    for part, wanted in zip(pair.decode.memory[0], expected, strict=True):
        assert np.array_equal(part, wanted)


@pytest.mark.parametrize("builders", [(page_major, page_major), (page_major, token_major)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_decode_skips_does_not_move(builders, chunks):
    relayout = "allow" if builders[0] is not builders[1] else ""
    pair = Pair(1, layout(builders[0]), layout(builders[1]), relayout=relayout)
    source = [Pages([1, 2, 3, 4, 5])]
    if chunks == 2:
        source = [Pages([1, 2, 3]), Pages([4, 5])]
    run(pair, source, Pages([9, 8, 7], 0, ((0, PAGE), (2 * PAGE, 3 * PAGE))))
    assert pair.at_decode().state is State.COMMITTED
    assert pair.at_prefill().state is State.COMMITTED
    assert_moved(pair, [(2, 9), (4, 8), (5, 7)])
    assert pair.at_decode().last.length_bytes == pair.at_prefill().last.length_bytes


def test_both_sides_may_skip_the_same_tokens():
    pair = Pair(1)
    skipped = ((0, 3 * PAGE),)
    run(pair, [Pages([4, 5], 0, skipped)], Pages([8, 7], 0, skipped))
    assert pair.at_decode().state is State.COMMITTED
    assert_moved(pair, [(4, 8), (5, 7)])


def test_prefill_may_skip_what_decode_has_already():
    pair = Pair(1)
    prefix = 3 * PAGE
    run(pair, [Pages([4, 5], 0, ((0, prefix),))], Pages([8, 7], prefix), prefix=prefix)
    assert pair.at_decode().state is State.COMMITTED
    assert_moved(pair, [(4, 8), (5, 7)])


def test_everything_may_be_skipped():
    pair = Pair(1)
    run(pair, [Pages([1, 2, 3, 4, 5])], Pages((), 0, ((0, TOKENS),)))
    assert pair.at_decode().state is State.COMMITTED
    assert_moved(pair, [])


def test_a_page_that_decode_names_and_prefill_skips_fails_the_transfer():
    pair = Pair(1)
    skipped = ((PAGE, 3 * PAGE),)
    run(pair, [Pages([1, 4, 5], 0, skipped)], Pages([9, 6, 8, 7], 0, ((PAGE, 2 * PAGE),)))
    for side in (pair.at_prefill(), pair.at_decode()):
        assert side.state is State.FAILED
        assert isinstance(side.last.error, TransferError)
        assert f"tokens [{2 * PAGE}, {3 * PAGE}) of group full, prefill skips" in str(
            side.last.error
        )
    assert_moved(pair, [])


def test_pages_that_are_not_named_are_not_held():
    pair = Pair(1)
    run(pair, [], Pages([9, 8, 7], 0, ((0, PAGE), (2 * PAGE, 3 * PAGE))))
    other = pair.receive(8, ids=[1, 2, 3, 4, 5], tokens=TOKENS, slot=1)
    assert other.error is None


@pytest.mark.parametrize("skipped", [((0, 2),), ((2, 6),), ((0, TOKENS + PAGE),)])
def test_skipped_tokens_are_whole_pages_within_the_list(skipped):
    pair = Pair(1)
    run(pair, [], Pages([9, 8, 7, 6], 0, skipped))
    assert pair.at_decode().state is State.FAILED
    assert isinstance(pair.at_decode().last.error, ConfigError)


def test_half_a_page_that_is_skipped_is_never_planned():
    made = plan(layout(), layout())
    placed = {"full": Pages([9], 0, ((0, PAGE - 1),))}
    for pieces in (
        lambda: made.batches({"full": Pages([1, 2])}, placed, {"full": [(PAGE, 2 * PAGE)]}),
        lambda: made.destination_pieces(placed, {"full": [(PAGE, 2 * PAGE - 1)]}),
    ):
        with pytest.raises(ConfigError, match="no whole pages of 4 tokens"):
            pieces()


def test_a_page_that_is_skipped_is_never_planned():
    made = plan(layout(), layout())
    whole, part = Pages([1, 2, 3]), Pages([1, 3], 0, ((PAGE, 2 * PAGE),))
    for side, lists in (("source", (part, whole)), ("destination", (whole, part))):
        source, destination = ({"full": listed} for listed in lists)
        with pytest.raises(ConfigError, match=rf"{side} pages .* skip tokens \[4, 8\)"):
            made.batches(source, destination, {"full": (0, 3 * PAGE)})


@pytest.mark.parametrize("skipped", [b"x", bytes(8), bytes(16), bytes(15) + b"\x80"])
def test_malformed_ranges_are_refused(skipped):
    with pytest.raises((RemoteProtocolError, ConfigError)):
        unpack_group(GroupPages(first_token=0, encoding="i4", ids=b"", skipped=skipped))


def test_pages_travel_with_what_they_skip():
    pages = Pages([4, 2], 8, ((8, 16), (20, 24)))
    back = unpack_group(pack_group(pages))
    assert (back.ids.tolist(), back.first_token, back.skipped) == ([4, 2], 8, pages.skipped)
