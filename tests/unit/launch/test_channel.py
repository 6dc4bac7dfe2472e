"""Lines over a socket pair."""

import socket

import pytest

from pdxfer.launch.channel import Channel, ChannelClosedError, number, numbers, real, text


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    with left, right:
        yield Channel(left), Channel(right)


def test_events_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    ours.send(event="a", value=1)
    ours.send(event="b", tokens=[1, 2])
    assert theirs.receive(1) == {"event": "a", "value": 1}
    assert theirs.receive(1) == {"event": "b", "tokens": [1, 2]}


def test_a_silent_end_is_a_timeout(ends):
    with pytest.raises(TimeoutError, match=r"0\.01"):
        ends[0].receive(0.01)


def test_a_closed_end_is_told_apart_from_silence(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosedError):
        ours.receive(1)
    with pytest.raises(ChannelClosedError):
        ours.send(event="x")


def test_fields_have_types():
    event = {"n": 3, "x": 0.5, "t": "y", "l": [1]}
    assert number(event, "n") == 3
    assert real(event, "x") == 0.5
    assert real(event, "n") == 3.0
    assert text(event, "t") == "y"
    assert numbers(event, "l") == [1]
    for read in (number, numbers, real):
        with pytest.raises(TypeError, match="'y'"):
            read(event, "t")
