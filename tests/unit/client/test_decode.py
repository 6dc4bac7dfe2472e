"""The decode client: connect, receive, place."""

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.client import Commit, Pages, PlanSummary, State
from pdxfer.errors import (
    ConfigError,
    DaemonUnavailableError,
    LayoutMismatchError,
    LocalProtocolError,
    PeerError,
    TransferError,
)
from pdxfer.layout import plan
from pdxfer.local.messages import (
    AbortTransfer,
    Attached,
    Connected,
    ConnectPeer,
    OpenReceive,
    Outcome,
    PlacePages,
    Refused,
)
from pdxfer.wire.pages import unpack_ids
from tests.support.fake_agent import refuse_with

PREFILL = "tcp://127.0.0.1:4711"
WAIT_S = 20


def ids_of(place):
    return {name: list(unpack_ids(g.encoding, g.ids)) for name, g in place.groups.items()}


def test_connect_returns_the_plans_summary(decode_agent, decode, cache):
    summary = plan(cache.layout, cache.layout).summary()
    decode_agent.on[ConnectPeer] = lambda conn, message: conn.send(
        Connected(request=message.request, summary=summary.to_wire())
    )
    got = decode.connect([PREFILL, "tcp://127.0.0.1:4712"], timeout_s=3)
    assert isinstance(got, PlanSummary)
    assert got == summary
    message = decode_agent.next(ConnectPeer)
    assert (message.prefill, message.timeout_s) == ([PREFILL, "tcp://127.0.0.1:4712"], 3.0)


@pytest.mark.parametrize("kind", [LayoutMismatchError, PeerError])
def test_connect_raises_the_refusal(decode_agent, decode, kind):
    decode_agent.on[ConnectPeer] = refuse_with(kind("no", fields={"dtype": "prefill=a, decode=b"}))
    with pytest.raises(kind, match="no") as caught:
        decode.connect(PREFILL)
    assert caught.value.fields == {"dtype": "prefill=a, decode=b"}


@pytest.mark.parametrize("prefill", ["", [], [""], [1]])
def test_bad_addresses_are_refused(decode, prefill):
    with pytest.raises(ConfigError, match="prefill="):
        decode.connect(prefill)
    with pytest.raises(ConfigError, match="prefill="):
        decode.receive(1, prefill)


def test_receive_with_pages(decode_agent, decode):
    receiving = decode.receive(5, PREFILL, [3, 1, 2], tokens=10, deadline_s=4)
    message = decode_agent.next(OpenReceive)
    assert (message.room, message.prefill, message.deadline_s) == (5, [PREFILL], 4.0)
    assert message.place is not None
    assert (message.place.tokens, message.place.prefix_tokens) == (10, 0)
    assert ids_of(message.place) == {"full": [3, 1, 2]}
    with pytest.raises(LocalProtocolError, match="have been placed"):
        receiving.place([4])


def test_receive_then_place(decode_agent, decode):
    receiving = decode.receive(5, PREFILL)
    message = decode_agent.next(OpenReceive)
    assert message.place is None
    assert message.deadline_s == limits.UNMATCHED_DEADLINE_S
    receiving.place(np.array([7, 8]), tokens=7)
    said = decode_agent.next(PlacePages)
    assert (said.transfer, said.sequence) == (receiving.slot, receiving.sequence)
    assert said.place.tokens == 7
    assert ids_of(said.place) == {"full": [7, 8]}
    with pytest.raises(LocalProtocolError):
        receiving.place([9])


@pytest.mark.parametrize(
    ("prefix", "pages", "first", "tokens"),
    [
        (0, [1, 2], 0, 8),
        (4, [1, 2], 4, 12),
        (6, [1, 2], 4, 12),
        (7, Pages([1, 2], 0), 0, 8),
        (4, [], 4, 4),
    ],
)
def test_where_pages_begin_and_how_many_tokens_they_hold(
    decode_agent, decode, prefix, pages, first, tokens
):
    decode.receive(1, PREFILL, pages, prefix_tokens=prefix)
    place = decode_agent.next(OpenReceive).place
    assert place.groups["full"].first_token == first
    assert (place.tokens, place.prefix_tokens) == (tokens, prefix)


@pytest.mark.parametrize(
    ("pages", "options", "text"),
    [
        ([0], {}, "page id 0 of group full"),
        ([16], {}, "outside 1 <= id < 16"),
        ([3, 3], {}, "page id 3 of group full at position 1 appeared before"),
        ([1, 2], {"tokens": 9}, "2 pages of 4 tokens from token 0 on end at token 8.*tokens=9"),
        ([1, 2, 3], {"tokens": 8}, "3 pages of 4 tokens from token 0 on end at token 12.*last 1 "),
        ([2, 3], {"tokens": 8, "prefix_tokens": 7}, "from token 4 on end at token 12.*last 1 out"),
        ([1, 2], {"tokens": 0}, "tokens=0"),
        ([], {}, "tokens=0: the pages hold no tokens"),
        ([], {"tokens": 1}, "0 pages of 4 tokens from token 0 on end at token 0"),
        ([1, 2], {"prefix_tokens": -1}, "prefix_tokens=-1"),
        ([1, 2], {"prefix_tokens": 9, "tokens": 8}, "prefix_tokens=9 is more than tokens=8"),
        (None, {"tokens": 8}, r"place\(\)"),
        (None, {"prefix_tokens": 8}, r"place\(\)"),
        ([1], {"deadline_s": 0}, "deadline_s=0"),
    ],
)
def test_bad_receives_bind_nothing(decode_agent, decode, pages, options, text):
    with pytest.raises(ConfigError, match=text):
        decode.receive(1, PREFILL, pages, **options)
    assert decode_agent.count(OpenReceive) == 0


def test_bad_place_can_be_repaired(decode_agent, decode):
    receiving = decode.receive(1, PREFILL)
    with pytest.raises(ConfigError, match="page id 99"):
        receiving.place([99])
    receiving.place([1])
    assert ids_of(decode_agent.next(PlacePages).place) == {"full": [1]}


def test_refused_receive_raises(decode_agent, decode):
    decode_agent.on[OpenReceive] = refuse_with(LocalProtocolError("duplicate room 1"))
    with pytest.raises(LocalProtocolError, match="duplicate room 1"):
        decode.receive(1, PREFILL, [1])


def test_place_refused_behind_the_opening(decode_agent, decode):
    """The agent opens the transfer, then finds its pages wrong: it ends with that error."""

    def act(conn, message):
        decode_agent.answer_open(conn, message)
        error = ConfigError("needs 3 pages")
        conn.send(Refused(request=message.request, **error.to_wire()))

    decode_agent.on[OpenReceive] = act
    receiving = decode.receive(1, PREFILL, [1])
    with pytest.raises(TimeoutError):
        receiving.wait(0.1)
    assert decode_agent.next(AbortTransfer).reason == "needs 3 pages"
    decode_agent.show(1, State.FAILED, error=TransferError("aborted"))
    with pytest.raises(ConfigError, match="needs 3 pages"):
        receiving.wait(WAIT_S)


def test_commit_carries_everything(decode_agent, decode):
    receiving = decode.receive(1, PREFILL, [1])
    aux = bytes(range(256)) * 256
    decode_agent.show(1, State.COMMITTED, length_bytes=256, runs=1, aux=aux, lane="tcp")
    assert receiving.wait(WAIT_S) == Commit(256, 1, aux, "tcp")
    assert receiving.wait(0) == Commit(256, 1, aux, "tcp")
    assert receiving.pages_returned
    assert receiving.error is None


def test_outcome_right_behind_the_opening(decode_agent, decode):
    """Everything in one read: the answer, the outcome, the board's word."""

    def act(conn, message):
        decode_agent.answer_open(conn, message)
        slot, sequence = decode_agent.rooms[message.room][1:]
        conn.send(Outcome(transfer=slot, sequence=sequence, state=State.COMMITTED, length_bytes=9))
        decode_agent.boards[conn].publish(slot, State.COMMITTED)

    decode_agent.on[OpenReceive] = act
    assert decode.receive(1, PREFILL, [1]).wait(WAIT_S).length_bytes == 9


def test_agent_that_answers_nonsense(decode_agent, decode):
    decode_agent.on[ConnectPeer] = lambda conn, message: conn.send(
        Attached(request=message.request, worker_id=1)
    )
    with pytest.raises(Exception, match="answered ConnectPeer with Attached"):
        decode.connect(PREFILL)


def test_refusal_of_the_whole_connection(decode_agent, decode):
    def act(conn, message):
        conn.send(Refused(code="remote_protocol", text="go away", retryable=False, fields={}))
        conn.close()

    decode_agent.on[OpenReceive] = act
    with pytest.raises(Exception, match="go away"):
        decode.receive(1, PREFILL)
    with pytest.raises(Exception, match="go away"):
        decode.receive(2, PREFILL)


def test_agent_dies_while_connecting(decode_agent, decode):
    decode_agent.on[ConnectPeer] = lambda conn, message: conn.close()
    with pytest.raises(DaemonUnavailableError, match="is gone"):
        decode.connect(PREFILL)
