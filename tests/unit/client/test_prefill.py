"""The prefill client: what it asks for, what it refuses to send, what it says at the end."""

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.client import Commit, DecodeClient, Pages, PrefillClient, State
from pdxfer.errors import (
    ConfigError,
    DaemonUnavailableError,
    LayoutMismatchError,
    LocalProtocolError,
    PeerError,
    TransferError,
)
from pdxfer.layout import combine, page_major
from pdxfer.local.messages import AbortTransfer, OpenSend, ReleaseSlot, SendChunk
from pdxfer.wire.messages import GroupPages
from pdxfer.wire.pages import unpack_ids
from tests.support.fake_agent import FakeAgent, ignore, refuse_with
from tests.unit.client.conftest import SmallCache

WAIT_S = 20


def test_open_asks_for_the_room(prefill_agent, prefill):
    sending = prefill.open(1 << 63, deadline_s=7, lease_s=8)
    message = prefill_agent.next(OpenSend)
    assert (message.room, message.deadline_s, message.lease_s) == (1 << 63, 7.0, 8.0)
    assert (sending.room, sending.state, sending.error) == (1 << 63, State.WAITING, None)
    assert not sending.pages_returned
    assert sending.prefix_tokens is None


def test_defaults_are_those_of_the_limits(prefill_agent, prefill):
    prefill.open(1)
    message = prefill_agent.next(OpenSend)
    assert message.deadline_s == limits.UNMATCHED_DEADLINE_S
    assert message.lease_s == limits.LEASE_S


def test_send_in_one_call(prefill_agent, prefill):
    sending = prefill.send(3, np.array([4, 2, 9]), tokens=11, aux=b"first token")
    chunk = prefill_agent.next(OpenSend).chunk
    assert chunk.groups == {
        "full": GroupPages(first_token=0, encoding="i4", ids=np.array([4, 2, 9], "<i4").tobytes())
    }
    assert (chunk.tokens, chunk.layers, chunk.last, chunk.aux) == (11, None, True, b"first token")
    prefill_agent.show(3, State.SENT, length_bytes=768, runs=3, lane="cma")
    assert sending.wait(WAIT_S, until=State.SENT) == Commit(768, 3, b"", "cma")
    assert sending.pages_returned
    assert prefill.finished() == [sending]
    prefill_agent.show(3, State.COMMITTED, length_bytes=768, runs=3, lane="cma")
    assert sending.wait(WAIT_S) == Commit(768, 3, b"", "cma")
    assert prefill.finished() == []


def test_chunks_and_layers(prefill_agent, prefill):
    sending = prefill.open(3)
    sending.send([1, 2], layers=[1, 0, 1], last=False)
    sending.send(Pages([3], first_token=8), layers=range(2), last=False)
    sending.send({"full": [4]}, tokens=16)
    chunks = [prefill_agent.next(SendChunk).chunk for _ in range(3)]
    assert [chunk.layers for chunk in chunks] == [[0, 1], [0, 1], None]
    assert [chunk.last for chunk in chunks] == [False, False, True]
    assert [chunk.groups["full"].first_token for chunk in chunks] == [0, 8, 12]
    assert [chunk.tokens for chunk in chunks] == [None, None, 16]
    with pytest.raises(LocalProtocolError, match="last chunk has been sent"):
        sending.send([5])
    assert prefill_agent.count(SendChunk) == 0


def test_two_groups(tmp_path):
    one = {"layers": [0], "kv_heads": 1, "head_dim": 8, "page_size": 4, "dtype": "bfloat16"}
    cache = SmallCache(
        combine(page_major(**one, pages=16), page_major(**one, pages=8, group="swa"))
    )
    with (
        FakeAgent(tmp_path / "agent.sock", "prefill") as agent,
        PrefillClient(agent.socket_path, cache) as client,
    ):
        client.send(1, {"full": [1, 2, 3], "swa": Pages([7], 8)}, tokens=12)
        groups = agent.next(OpenSend).chunk.groups
        assert {name: group.first_token for name, group in groups.items()} == {"full": 0, "swa": 8}
        with pytest.raises(ConfigError, match="2 groups"):
            client.send(2, [1])
        with pytest.raises(ConfigError, match="page id 8 of group swa at position 0"):
            client.send(3, {"swa": [8]})
    cache.shared.close()


def test_fifteen_thousand_pages_cost_four_bytes_each(tmp_path):
    cache = SmallCache(
        page_major(
            layers=[0], kv_heads=1, head_dim=8, page_size=1, pages=40_000, dtype="float8_e4m3fn"
        )
    )
    ids = np.random.default_rng(1).permutation(39_999)[:15_000] + 1
    with (
        FakeAgent(tmp_path / "agent.sock", "prefill") as agent,
        PrefillClient(agent.socket_path, cache) as client,
    ):
        client.send(1, ids)
        group = agent.next(OpenSend).chunk.groups["full"]
        assert len(group.ids) == 60_000
        assert np.array_equal(unpack_ids(group.encoding, group.ids), ids)
    cache.shared.close()


@pytest.mark.parametrize("room", [0, -1, 1 << 64, "7", 1.0, True, None])
def test_bad_rooms_are_refused(prefill_agent, prefill, room):
    with pytest.raises(ConfigError, match="room="):
        prefill.open(room)
    assert prefill_agent.count(OpenSend) == 0


@pytest.mark.parametrize(
    ("pages", "options", "text"),
    [
        ([1, 0], {}, "page id 0 of group full at position 1 is outside 1 <= id < 16"),
        ([16], {}, "page id 16 of group full at position 0"),
        ([-1], {}, "page id -1"),
        ([1.5], {}, "integers"),
        ([[1]], {}, "one-dimensional"),
        ({"swa": [1]}, {}, "group 'swa'"),
        ([1, 2, 3], {"tokens": 4}, "3 pages of 4 tokens from token 0 on end.*leave the last 2 out"),
        ([1], {"tokens": 0}, "tokens=0"),
        ([1], {"tokens": True}, "tokens=True"),
        ([1], {"tokens": 4.0}, "tokens=4.0"),
        ([1], {"layers": [2]}, r"layers=\[2\].*\[0, 1\]"),
        ([1], {"layers": []}, r"layers=\[\]"),
        ([1], {"aux": bytes(limits.AUX_BYTES_MAX + 1)}, "aux has 65537 bytes, at most 65536"),
        ([1], {"aux": b"x", "last": False}, "aux travels with the last chunk"),
    ],
)
def test_bad_chunks_are_refused_before_anything_is_sent(
    prefill_agent, prefill, pages, options, text
):
    sending = prefill.open(9)
    with pytest.raises(ConfigError, match=text):
        sending.send(pages, **options)
    sending.send([1])  # the transfer is as it was
    assert prefill_agent.next(SendChunk).chunk.last
    assert prefill_agent.count(SendChunk) == 0


def test_send_in_one_call_opens_no_room_when_its_chunk_is_refused(prefill_agent, prefill):
    with pytest.raises(ConfigError, match="page id 0"):
        prefill.send(9, [0])
    assert prefill_agent.count(OpenSend) == 0


def test_event_is_waited_for_before_the_chunk_leaves(prefill_agent, prefill):
    class Event:
        def synchronize(self):
            seen.append(prefill_agent.count(SendChunk))

    seen = []
    sending = prefill.open(1)
    sending.send([1], after=Event())
    prefill_agent.next(SendChunk)
    assert seen == [0]


def test_event_that_fails_sends_nothing(prefill_agent, prefill):
    class Event:
        def synchronize(self):
            raise FloatingPointError

    sending = prefill.open(1)
    with pytest.raises(FloatingPointError):
        sending.send([1], after=Event())
    sending.send([2])
    assert prefill_agent.next(SendChunk).chunk.groups["full"].ids == b"\2\0\0\0"


def test_prefix_tokens_are_known_from_ready_on(prefill_agent, prefill):
    sending = prefill.open(4)
    prefill_agent.show(4, State.READY, prefix_tokens=8)
    assert sending.wait(WAIT_S, until=State.READY) == Commit(0, 0, b"", "")
    assert sending.prefix_tokens == 8
    prefill_agent.show(4, State.MOVING, outcome=False)
    assert sending.prefix_tokens == 8
    prefill_agent.show(4, State.SENT, length_bytes=1)
    assert sending.wait(WAIT_S, until=State.SENT).length_bytes == 1
    assert sending.prefix_tokens == 8


def test_prefix_tokens_without_a_wait(prefill_agent, prefill):
    sending = prefill.open(4)
    prefill_agent.show(4, State.READY, prefix_tokens=0)
    assert sending.poll() is State.READY
    assert sending.prefix_tokens == 0


def test_refused_open_raises_the_layout_mismatch(prefill_agent, prefill):
    error = LayoutMismatchError("heads differ", fields={"heads": "prefill=8, decode=4"})
    prefill_agent.on[OpenSend] = refuse_with(error)
    with pytest.raises(LayoutMismatchError, match="heads differ") as caught:
        prefill.open(1)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.fields == {"heads": "prefill=8, decode=4"}
    del prefill_agent.on[OpenSend]
    assert prefill.open(2).state is State.WAITING


def test_chunk_refused_by_the_agent_ends_the_transfer(prefill_agent, prefill):
    prefill_agent.on[SendChunk] = refuse_with(ConfigError("pages end at 4, tokens=9"))
    sending = prefill.open(1)
    sending.send([1], tokens=9, last=False)
    # The agent's no comes later than the call; the client gives the transfer up then.
    with pytest.raises(TimeoutError):
        sending.wait(0.1)
    assert prefill_agent.next(AbortTransfer).reason == "pages end at 4, tokens=9"
    assert isinstance(sending.error, ConfigError)
    with pytest.raises(ConfigError, match="tokens=9"):
        sending.send([2])
    prefill_agent.show(1, State.FAILED, error=TransferError("aborted"))
    with pytest.raises(ConfigError, match="pages end at 4, tokens=9"):
        sending.wait(WAIT_S)
    assert sending.pages_returned
    assert prefill.finished() == [sending]


def test_send_after_failure_raises_the_cause(prefill_agent, prefill):
    sending = prefill.open(1)
    prefill_agent.show(1, State.FENCING, error=PeerError("decode went away"))
    with pytest.raises(PeerError, match="decode went away"):
        sending.send([1])
    assert prefill_agent.count(SendChunk) == 0


def test_late_answer_to_an_abandoned_open_is_aborted_and_released(prefill_agent, cache):
    held = []
    prefill_agent.on[OpenSend] = lambda conn, message: held.append((conn, message))
    with PrefillClient(prefill_agent.socket_path, cache, timeout_s=0.2) as client:
        with pytest.raises(DaemonUnavailableError, match="OpenSend"):
            client.open(6)
        prefill_agent.next(OpenSend)
        prefill_agent.on.clear()
        prefill_agent.run(prefill_agent.answer_open, *held[0])
        client.check_agent()
        abort = prefill_agent.next(AbortTransfer)
        assert abort.reason == "the worker stopped waiting for the answer"
        prefill_agent.show(6, State.FAILED, error=TransferError("aborted"))
        assert client.finished() == []
        assert prefill_agent.next(ReleaseSlot).transfer == abort.transfer


def send_again_and_again(sending, pages):
    for _ in range(100):
        sending.send(pages, last=False)


def test_agent_that_stops_reading(prefill_agent, cache, monkeypatch):
    """A chunk that it does not take within the timeout gives the transfer up, and says so."""
    with PrefillClient(prefill_agent.socket_path, cache, timeout_s=0.2) as client:
        sending = client.open(1)

        def pause():
            [conn] = prefill_agent._server.connections
            prefill_agent._loop.remove_reader(conn._sock.fileno())

        def resume():
            [conn] = prefill_agent._server.connections
            prefill_agent._loop.add_reader(conn._sock.fileno(), conn._on_readable)

        prefill_agent.run(pause)
        pages = np.tile(np.array([1, 3, 5, 7]), 10_000)
        with pytest.raises(DaemonUnavailableError, match="did not read the pages of room 1"):
            send_again_and_again(sending, pages)
        sending.abort("again: nothing more happens")
        prefill_agent.run(resume)
        prefill_agent.show(1, State.FAILED, error=TransferError("aborted"))
        with pytest.raises(TransferError):
            sending.wait(WAIT_S)
        assert prefill_agent.next(AbortTransfer).reason == "the agent did not take its pages"
        assert prefill_agent.count(AbortTransfer) == 0


def test_ignored_open_times_out(prefill_agent, cache):
    prefill_agent.on[OpenSend] = ignore
    with (
        PrefillClient(prefill_agent.socket_path, cache, timeout_s=0.05) as client,
        pytest.raises(DaemonUnavailableError, match=r"OpenSend within timeout_s=0\.05") as caught,
    ):
        client.open(1)
    assert caught.value.retryable


def test_roles_do_not_mix():
    assert not hasattr(PrefillClient, "receive")
    assert not hasattr(DecodeClient, "send")
