"""Which writers a decode worker is told of, and how its board names them."""

from types import SimpleNamespace

import pytest

from pdxfer.agent.writers import Writers
from pdxfer.fabric.lanes import board_code
from pdxfer.local.messages import TransferWriters, Writer

ONE, TWO, FAR = b"1" * 16, b"2" * 16, b"f" * 16
REACH = {ONE: ["cma", "tcp"], TWO: ["tcp", "cma"], FAR: ["tcp"]}
PIDFDS = {ONE: 11, TWO: 12}


class Port:
    """A worker's connection and board that note what they are given."""

    def __init__(self):
        self.slots, self.told, self.writers, self.said, self.row = {4: 9}, {}, set(), [], {}
        self.connection = SimpleNamespace(send=self.send)
        self.board = SimpleNamespace(set_details=self.set_details)

    def send(self, message, fds=()):
        assert not self.row, "told before the board shows it"
        self.said.append((message, list(fds)))

    def set_details(self, slot, **details):
        self.row = {"slot": slot, **details}


def note(port, *peers, pidfds=PIDFDS):
    lanes = SimpleNamespace(needs_pidfd=lambda lane: lane == "cma")
    neighbours = SimpleNamespace(pidfd=lambda peer: pidfds.get(peer, -1))
    receiving = SimpleNamespace(slot=4, generation=3, legs={(peer, 0): None for peer in peers})
    Writers(lanes, neighbours, REACH.__getitem__).note(port, receiving)


@pytest.mark.parametrize(
    ("peers", "row", "said"),
    [
        ([FAR], ("tcp", FAR, 0), []),
        ([ONE], ("cma", ONE, 1), [(Writer(incarnation=ONE), [11])]),
        # the lane it may come to counts, not the present one alone
        ([TWO, FAR], ("cma", TWO, 1), [(Writer(incarnation=TWO), [12])]),
        (
            [TWO, ONE, FAR],
            ("cma", ONE, 2),
            [
                (Writer(incarnation=ONE), [11]),
                (Writer(incarnation=TWO), [12]),
                (TransferWriters(transfer=4, sequence=9, incarnations=[ONE, TWO]), []),
            ],
        ),
    ],
)
def test_all_that_may_write_by_themselves_are_told(peers, row, said):
    port = Port()
    note(port, *peers)
    lane, peer, count = row
    assert port.row == {
        "slot": 4,
        "generation": 3,
        "lane_code": board_code(lane),
        "peer_incarnation": peer,
        "peer_count": count,
    }
    assert port.said == said


def test_a_writer_is_handed_over_once_and_a_receive_noted_once():
    port = Port()
    note(port, ONE)
    before = list(port.said)
    note(port, ONE)
    assert port.said == before
    port.slots[4], port.row = 10, {}
    note(port, ONE)
    assert port.said == before
    assert port.row["peer_count"] == 1


def test_a_writer_without_a_descriptor_still_counts():
    """The worker then never takes it for ended."""
    port = Port()
    note(port, ONE, pidfds={})
    assert port.said == []
    assert port.row["peer_count"] == 1
    assert port.writers == set()


def test_a_slot_that_the_worker_gave_back_is_left_alone():
    port = Port()
    port.slots.clear()
    note(port, ONE)
    assert port.said == []
    assert port.row == {}
