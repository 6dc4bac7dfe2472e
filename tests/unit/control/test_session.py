"""Numbering, acknowledgements and resends of one session, with time as an argument."""

from __future__ import annotations

import random

import msgspec
import pytest

from pdxfer.control.session import Belonging, Session, stale_answer
from pdxfer.errors import LocalProtocolError, PeerError, RemoteProtocolError
from pdxfer.limits import (
    CONTROL_ACK_DELAY_S,
    CONTROL_ACK_EVERY_MESSAGES,
    CONTROL_RESEND_AFTER_S,
    CONTROL_RESEND_BURST_MESSAGES,
    CONTROL_UNACKED_BYTES_MAX,
    CONTROL_UNACKED_MESSAGES_MAX,
    LIVENESS_TIMEOUT_S,
)
from pdxfer.wire.codec import decode
from pdxfer.wire.messages import (
    Abort,
    Committed,
    Envelope,
    Heartbeat,
    Hello,
    Matched,
    Reject,
    StaleSession,
)

PREFILL, DECODE, OTHER = b"p" * 16, b"d" * 16, b"o" * 16


def matched(number: int) -> Matched:
    return Matched(generation=number, source_worker=0)


def pair(now: float = 0.0) -> tuple[Session, Session]:
    """(decode, prefill) after the exchange of `Hello`."""
    decode_side = Session(DECODE, None, now, session=7)
    prefill_side = Session(PREFILL, DECODE, now, session=7)
    hello = decode_side.wrap(Hello(version=0, role="decode"), now)
    assert len(prefill_side.receive(decode(hello), now)) == 1
    answer = prefill_side.wrap(Hello(version=0, role="prefill"), now)
    assert len(decode_side.receive(decode(answer), now)) == 1
    return decode_side, prefill_side


def give(session: Session, frames: list[bytes], now: float) -> list[int]:
    """Generations of what is delivered."""
    return [
        message.generation
        for frame in frames
        for message in session.receive(decode(frame), now)
        if isinstance(message, Matched)
    ]


def test_numbers_start_at_one_and_carry_the_acknowledgement():
    decode_side, prefill_side = pair()
    first = decode(decode_side.wrap(matched(1), 0.0))
    assert (first.number, first.ack, first.source, first.destination) == (1, 0, DECODE, PREFILL)
    assert first.session == 7
    prefill_side.receive(first, 0.0)
    reply = decode(prefill_side.wrap(Committed(generation=1), 0.0))
    assert (reply.number, reply.ack) == (1, 1)
    decode_side.receive(reply, 0.0)
    assert decode_side.unacked == 0
    assert prefill_side.unacked == 1


def test_a_heartbeat_ahead_of_numbered_messages_says_only_that_its_sender_lives():
    decode_side, prefill_side = pair()
    frames = [decode_side.wrap(Abort(generation=g), 0.0) for g in (1, 2)]
    beats = [
        decode_side.wrap(Heartbeat(oldest_live_generation=3 + n), 1.0 + n / 10) for n in range(3)
    ]
    for n, beat in enumerate(beats):
        assert prefill_side.receive(decode(beat), 5.0 + n) == [Heartbeat()]
        assert prefill_side.heard_at == 5.0 + n
    first, second = (decode(frame) for frame in frames)
    assert prefill_side.receive(first, 9.0) == [first.message]
    assert prefill_side.receive(second, 9.0) == [
        second.message,
        Heartbeat(after=2, oldest_live_generation=3),
        Heartbeat(after=2, oldest_live_generation=5),
    ]
    assert prefill_side.receive(decode(beats[0]), 9.0)[0].oldest_live_generation == 3
    late = decode(beats[0])
    message = msgspec.structs.replace(late.message, after=2 + CONTROL_UNACKED_MESSAGES_MAX + 1)
    with pytest.raises(RemoteProtocolError, match="field after: 4099 when 2 was received"):
        prefill_side.receive(msgspec.structs.replace(late, message=message), 9.0)


def test_hello_and_heartbeat_are_outside_the_numbering():
    decode_side, prefill_side = pair()
    beat = decode(decode_side.wrap(Heartbeat(), 0.0))
    assert beat.number == 0
    assert prefill_side.receive(beat, 0.0) == [Heartbeat()]
    assert prefill_side.receive(beat, 0.0) == [Heartbeat()]
    assert decode_side.unacked == 0


def test_repeat_is_dropped_and_acknowledged_again():
    decode_side, prefill_side = pair()
    frame = decode_side.wrap(matched(1), 0.0)
    assert give(prefill_side, [frame, frame], 0.0) == [1]
    assert prefill_side.due(CONTROL_ACK_DELAY_S / 2) == []
    (ack,) = prefill_side.due(CONTROL_ACK_DELAY_S)
    assert (decode(ack).message, decode(ack).ack, decode(ack).number) == (None, 1, 0)
    give(prefill_side, [frame], 1.0)
    assert prefill_side.next_timer() == pytest.approx(1.0 + CONTROL_ACK_DELAY_S)


def test_a_full_batch_is_acknowledged_at_once():
    decode_side, prefill_side = pair()
    frames = [decode_side.wrap(matched(n), 0.0) for n in range(1, CONTROL_ACK_EVERY_MESSAGES + 1)]
    give(prefill_side, frames, 0.0)
    (ack,) = prefill_side.due(0.0)
    decode_side.receive(decode(ack), 0.0)
    assert decode_side.unacked == 0
    assert decode_side.next_timer() is None


def test_what_a_lost_message_leaves_behind_is_asked_for_and_sent_again_in_order():
    decode_side, prefill_side = pair()
    frames = [decode_side.wrap(matched(n), 0.0) for n in range(1, 6)]
    assert give(prefill_side, [frames[0], *frames[2:]], 1.0) == [1]
    (ask,) = prefill_side.due(1.0)
    assert (decode(ask).ack, decode(ask).number) == (1, 2)
    decode_side.receive(decode(ask), 1.0)
    again = decode_side.due(1.0)
    assert again == frames[1:]
    assert give(prefill_side, again, 1.0) == [2, 3, 4, 5]


def test_a_gap_is_asked_for_once_until_something_changes():
    decode_side, prefill_side = pair()
    frames = [decode_side.wrap(matched(n), 0.0) for n in range(1, 6)]
    give(prefill_side, frames[1:3], 1.0)
    assert len(prefill_side.due(1.0)) == 1
    give(prefill_side, frames[3:], 1.01)
    assert prefill_side.due(1.01) == []
    give(prefill_side, frames[4:], 1.2)
    assert len(prefill_side.due(1.2)) == 1


def test_messages_still_on_their_way_are_not_sent_again_for_a_request():
    decode_side, prefill_side = pair()
    frames = [decode_side.wrap(matched(n), 1.0) for n in range(1, 4)]
    give(prefill_side, frames[1:], 1.01)
    (ask,) = prefill_side.due(1.01)
    decode_side.receive(decode(ask), 1.02)
    assert decode_side.due(1.02) == []
    assert decode_side.due(1.11) == frames


def test_unanswered_messages_are_sent_again_with_growing_waits():
    decode_side, _ = pair()
    frame = decode_side.wrap(matched(1), 0.0)
    times, now = [], 0.0
    while now < 20.0:
        now = decode_side.next_timer()
        assert now is not None
        assert decode_side.due(now) == [frame]
        times.append(now)
    waits = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert waits[0] == pytest.approx(CONTROL_RESEND_AFTER_S)
    assert waits[1:4] == pytest.approx([2.0, 4.0, 4.0])


def test_a_resend_is_one_burst_and_acknowledgements_bring_the_next():
    decode_side, prefill_side = pair()
    count = 3 * CONTROL_RESEND_BURST_MESSAGES
    lost = [decode_side.wrap(matched(n), 0.0) for n in range(1, count + 1)]
    decode_side.reconnected(1.0)
    got = []
    for _ in range(20):
        frames = [frame for frame in decode_side.due(1.0) if decode(frame).message is not None]
        assert len(frames) <= CONTROL_RESEND_BURST_MESSAGES
        got += give(prefill_side, frames, 1.0)
        for ack in prefill_side.due(1.0):
            decode_side.receive(decode(ack), 1.0)
    assert got == list(range(1, len(lost) + 1))
    assert decode_side.unacked == 0


def test_a_reader_that_is_slow_but_goes_on_gets_no_repeats():
    decode_side, prefill_side = pair()
    frames = [decode_side.wrap(matched(n), 0.0) for n in range(1, 513)]
    now = 0.0
    while frames:  # one batch each 0.9 s, for 14 s
        now += 0.9
        batch, frames = (
            frames[:CONTROL_ACK_EVERY_MESSAGES],
            frames[CONTROL_ACK_EVERY_MESSAGES:],
        )
        give(prefill_side, batch, now)
        for ack in prefill_side.due(now):
            decode_side.receive(decode(ack), now)
        assert decode_side.due(now) == []


def test_reconnected_asks_the_peer_to_send_again_too():
    decode_side, prefill_side = pair()
    lost = prefill_side.wrap(matched(1), 0.0)
    decode_side.reconnected(1.0)
    (ask,) = decode_side.due(1.0)
    prefill_side.receive(decode(ask), 1.0)
    assert prefill_side.due(1.0) == [lost]


def test_too_many_unacknowledged_messages_close_the_session():
    decode_side, _ = pair()
    for number in range(1, CONTROL_UNACKED_MESSAGES_MAX + 1):
        decode_side.wrap(matched(number), 0.0)
    with pytest.raises(PeerError, match="CONTROL_UNACKED_MESSAGES_MAX") as raised:
        decode_side.wrap(matched(1), 3.0)
    assert raised.value.retryable
    assert decode_side.closed is raised.value
    assert decode_side.next_timer() is None
    assert decode_side.due(99.0) == []
    with pytest.raises(PeerError):
        decode_side.wrap(Heartbeat(), 3.0)
    with pytest.raises(PeerError):
        decode_side.receive(
            Envelope(source=PREFILL, destination=DECODE, session=7, number=0, ack=0), 3.0
        )


def test_too_many_unacknowledged_bytes_close_the_session():
    decode_side, _ = pair()
    large = Reject(code="peer", text="x" * (CONTROL_UNACKED_BYTES_MAX // 32))
    for _ in range(31):
        decode_side.wrap(large, 0.0)
    with pytest.raises(PeerError, match=str(CONTROL_UNACKED_BYTES_MAX)):
        decode_side.wrap(large, 0.0)


def test_only_hello_may_come_before_the_peer_is_known():
    session = Session(DECODE, None, 0.0)
    with pytest.raises(LocalProtocolError, match="Matched before the peer's Hello"):
        session.wrap(matched(1), 0.0)
    assert session.due(99.0) == []
    assert session.next_timer() is None
    early = Envelope(
        source=PREFILL, destination=DECODE, session=1, number=1, ack=0, message=matched(1)
    )
    assert session.receive(early, 0.0) == []
    assert session.remote is None
    hello = Hello(version=0, role="prefill")
    answer = Envelope(source=PREFILL, destination=DECODE, session=1, number=0, ack=0, message=hello)
    assert session.receive(answer, 0.0) == [hello]
    assert session.remote == PREFILL
    assert session.receive(early, 0.0) == [matched(1)]


def test_reject_may_come_instead_of_hello():
    session = Session(DECODE, None, 0.0)
    reject = Reject(code="peer", text="no")
    frame = Envelope(source=PREFILL, destination=DECODE, session=1, number=1, ack=0, message=reject)
    assert session.receive(frame, 0.0) == [reject]


def envelope(**changes) -> Envelope:
    fields = {"source": DECODE, "destination": PREFILL, "session": 7, "number": 0, "ack": 0}
    return Envelope(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Belonging.CURRENT),
        ({"destination": OTHER}, Belonging.STALE),
        ({"destination": b""}, Belonging.STALE),
        ({"destination": b"", "message": Hello(version=0, role="decode")}, Belonging.CURRENT),
        ({"source": OTHER}, Belonging.NEW_LIFE),
        ({"session": 6}, Belonging.STALE),
        ({"session": 8}, Belonging.NEW_SESSION),
    ],
)
def test_whose_message_an_envelope_is(changes, expected):
    _, prefill_side = pair()
    found = envelope(**changes)
    assert prefill_side.belonging(found) is expected
    if expected is not Belonging.CURRENT:
        with pytest.raises(RemoteProtocolError, match=expected.value):
            prefill_side.receive(found, 0.0)


def test_a_stale_message_is_answered_with_the_life_that_answers():
    found = decode(stale_answer(PREFILL, envelope(destination=OTHER, session=3)))
    assert found.message == StaleSession(incarnation=PREFILL)
    assert (found.source, found.destination, found.session, found.number) == (PREFILL, DECODE, 3, 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ack": 1}, "ack"),
        ({"number": 1, "message": Heartbeat()}, "number"),
        ({"number": 0, "message": matched(1)}, "number"),
        ({"number": CONTROL_UNACKED_MESSAGES_MAX + 1, "message": matched(1)}, "number"),
        ({"number": 5}, "number"),
    ],
)
def test_what_no_peer_may_send_is_refused(changes, field):
    _, prefill_side = pair()
    with pytest.raises(RemoteProtocolError, match=f"field {field}"):
        prefill_side.receive(envelope(**changes), 0.0)


def test_silence_is_measured_from_the_last_frame():
    decode_side, prefill_side = pair()
    assert not prefill_side.expired(LIVENESS_TIMEOUT_S - 0.01)
    prefill_side.receive(decode(decode_side.wrap(Heartbeat(), 5.0)), 5.0)
    assert not prefill_side.expired(LIVENESS_TIMEOUT_S + 4.99)
    assert prefill_side.expired(LIVENESS_TIMEOUT_S + 5.0)


class Lossy:
    """A wire that loses, repeats and reorders, by its seed; time runs in steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.wires: tuple[list[tuple[float, bytes]], ...] = ([], [])
        self.quiet = False

    def send(self, direction: int, frame: bytes) -> None:
        chance = self.random.random()
        copies = 1 if self.quiet else 0 if chance < 0.2 else 2 if chance < 0.35 else 1
        for _ in range(copies):
            delay = self.random.choice((0.0, 0.001, 0.05, 0.4))
            self.wires[direction].append((self.now + delay, frame))

    def arrived(self, direction: int) -> list[bytes]:
        due = [frame for at, frame in self.wires[direction] if at <= self.now]
        self.wires[direction][:] = [item for item in self.wires[direction] if item[0] > self.now]
        return due


@pytest.mark.parametrize("seed", range(10))
def test_each_message_is_delivered_once_and_in_order_whatever_the_wire_does(seed):
    sides, wire = pair(), Lossy(seed)
    total, sent, got = 120, [0, 0], ([], [])
    while (len(got[0]), len(got[1])) != (total, total) or sides[0].unacked or sides[1].unacked:
        assert wire.now < 300, f"seed {seed}: stuck at {len(got[0])}, {len(got[1])}"
        for me, session in enumerate(sides):
            for _ in range(wire.random.choice((0, 0, 1, 5))):
                if sent[me] < total:
                    sent[me] += 1
                    wire.send(me, session.wrap(matched(sent[me]), wire.now))
            got[me].extend(give(session, wire.arrived(1 - me), wire.now))
            for frame in session.due(wire.now):
                wire.send(me, frame)
        wire.now += 0.01
    assert got[0] == got[1] == list(range(1, total + 1))


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_sent_any_more_once_all_is_acknowledged(seed):
    sides, wire = pair(), Lossy(seed)
    for number in range(1, 51):
        wire.send(0, sides[0].wrap(matched(number), wire.now))
    for step in range(3000):
        wire.quiet = step > 1000
        for me, session in enumerate(sides):
            give(session, wire.arrived(1 - me), wire.now)
            for frame in session.due(wire.now):
                wire.send(me, frame)
        wire.now += 0.01
    assert wire.wires == ([], [])
    assert [session.next_timer() for session in sides] == [None, None]
