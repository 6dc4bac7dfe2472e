"""Errors name the one that failed: its address, instance, rank and lane, in text and fields."""

import ctypes
import mmap

import pytest

from pdxfer.errors import LayoutMismatchError, TransferError
from pdxfer.fabric.base import BatchEnded, CommitSent, PathClosed
from pdxfer.layout import Rank, page_major
from pdxfer.memory import MemoryRange, unreadable_at
from pdxfer.protocol.decode.sources import PrefillPeer, Sources
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.workers import Worker
from tests.support.cluster import ADDRESS, Cluster, full

ENDS = {
    "room": "7",
    "prefill_instance": "",
    "prefill_rank": "0",
    "decode_instance": "",
    "decode_rank": "0",
    "lane": "inproc",
}


def layout():
    return page_major(
        layers=range(2), kv_heads=2, head_dim=8, page_size=4, pages=16, dtype="bfloat16"
    )


class Moving:
    """A room whose bytes have been handed to the lane, and not moved yet."""

    def __init__(self):
        self.cluster = cluster = Cluster(0)
        self.prefill, self.decode = cluster.prefill(), cluster.decode()
        self.prefill.attach(0, layout())
        self.decode.attach(0, layout())
        cluster.join(self.decode, self.prefill)
        cluster.run()
        now = cluster.now
        self.sending = self.prefill.machine.open(0, 7, 0, deadline=now + 60, lease_s=30.0)
        self.prefill.pump()
        self.receiving = self.decode.machine.receive(
            0, 7, 0, (ADDRESS,), deadline=now + 60, now=now
        )
        self.decode.machine.place(0, 0, GivenPlaces(full([5]), 4), now=now)
        self.decode.pump()
        cluster.run()
        self.prefill.machine.send(0, 0, GivenChunk(full([3]), tokens=4))
        self.prefill.pump()
        self.peer = self.decode.machine.incarnation

    def post_fails(self, error):
        [(peer, ticket)] = self.prefill.half._tickets
        event = BatchEnded(
            peer, self.receiving.generation, ticket, length_bytes=0, runs=0, error=error
        )
        self.prefill.half.on_event(self.prefill.fabric, event, self.cluster.now)
        self.prefill.pump()
        self.cluster.run()


def assert_names_both(error, peer):
    assert {name: error.fields.get(name) for name in ENDS} == ENDS
    assert error.fields["peer"] == peer.hex()
    for text in (
        "from rank 0 of prefill instance ''",
        "to rank 0 of decode instance ''",
        f"decode agent {peer.hex()[:12]}",
        "lane inproc",
    ):
        assert text in str(error)


def test_a_write_that_fails_names_both_ends_and_the_lane():
    moving = Moving()
    moving.post_fails("UCS_ERR_IO_ERROR")
    assert "room 7: a write to decode failed: UCS_ERR_IO_ERROR" in str(moving.sending.error)
    assert_names_both(moving.sending.error, moving.peer)
    assert_names_both(moving.receiving.error, moving.peer)  # decode is told the same
    assert moving.receiving.error.fields["address"] == ADDRESS


@pytest.mark.parametrize("first", ["write", "commit", "path"])
def test_a_source_page_that_cannot_be_read_is_named_and_is_no_fault_of_the_peer(first):
    """Whichever of its consequences the lane tells first."""
    moving = Moving()
    half, fabric = moving.prefill.half, moving.prefill.fabric
    half._memory = lambda worker: (MemoryRange(0, 4096, None),)
    if first == "write":
        moving.post_fails("UCS_ERR_ENDPOINT_TIMEOUT")
    elif first == "commit":
        half._commits[moving.peer, 999] = (moving.peer, moving.receiving.generation, 0)
        half.on_event(
            fabric, CommitSent(moving.peer, 0, 999, error="path 1 is closed"), moving.cluster.now
        )
    else:
        half.on_event(
            fabric, PathClosed(moving.peer, error="reset", drained=True), moving.cluster.now
        )
    error = moving.sending.error
    assert isinstance(error, TransferError)
    assert str(error).startswith("the source memory cannot be read at 0x0, byte 0 of region 0")
    assert error.fields["region"] == "0"
    assert not error.retryable


def test_a_commit_that_fails_names_both_ends_and_the_lane():
    moving = Moving()
    machine = moving.prefill.machine
    machine.on_commit_sent(moving.peer, moving.receiving.generation, 0, error="UCS_ERR_CANCELED")
    assert_names_both(moving.sending.error, moving.peer)


def test_a_path_that_breaks_names_the_agent_and_the_lane():
    moving = Moving()
    moving.prefill.machine.on_path_closed(moving.peer, "reset", drained=True)
    error = moving.sending.error
    assert str(error) == (
        f"the path to decode agent {moving.peer.hex()[:12]} by lane inproc is closed: reset"
    )
    assert error.fields == {"peer": moving.peer.hex(), "lane": "inproc"}


@pytest.mark.parametrize("lost", ["sender_lost", "sender_unwatched", "peer_lost"])
def test_a_lane_or_agent_that_is_lost_at_decode_is_named_by_address_and_lane(lost):
    moving = Moving()
    machine, now = moving.decode.machine, moving.cluster.now
    proof = ("revoked",) if lost == "sender_lost" else ()
    getattr(machine, lost)(moving.prefill.machine.incarnation, "reset", *proof, now)
    error = moving.receiving.error
    assert f"the prefill agent at {ADDRESS} (lane inproc)" in str(error)
    assert "reset" in str(error)
    assert error.fields == {"address": ADDRESS, "lane": "inproc"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_goes_away_is_named_by_rank_and_instance(role):
    moving = Moving()
    if role == "prefill":
        moving.prefill.machine.detach(0, "killed")
        moving.prefill.pump()
        error = moving.sending.error
    else:
        moving.decode.machine.detach(0, "killed", moving.cluster.now)
        moving.decode.pump()
        error = moving.receiving.error
    assert f"rank 0 of {role} instance ''" in str(error)
    assert error.fields == {f"{role}_instance": "", f"{role}_rank": "0"}


def test_a_source_rank_that_appears_twice_is_named_by_both_addresses():
    sources = Sources()
    worker = Worker(0, "", Rank(), layout(), "allow", ())
    for number, address in enumerate(("tcp://a:1", "tcp://b:1")):
        peer_id = bytes([number]) * 16
        sources.link(address).peer_id = peer_id
        sources.peers[peer_id] = PrefillPeer(peer_id, address, revision=1, workers={0: worker})
    with pytest.raises(LayoutMismatchError) as raised:
        sources.agree(("tcp://a:1", "tcp://b:1"), worker)
    assert str(raised.value).startswith(
        "rank 0 of prefill instance '' appears twice: worker 0 at tcp://a:1, and worker 0 at tcp://b"
    )
    assert raised.value.fields["prefill_rank"] == "0"
    assert "tcp://a:1" in raised.value.fields["address"]


def test_memory_that_cannot_be_read_is_found_by_its_first_address():
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 4 * page) as mapping:
        view = ctypes.c_char.from_buffer(mapping)
        address = ctypes.addressof(view)
        assert unreadable_at(address, 4 * page) is None
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert libc.mprotect(address + 2 * page, page, 0) == 0
        assert unreadable_at(address, 2 * page) is None
        assert unreadable_at(address, 4 * page) == address + 2 * page
        assert unreadable_at(address + 3 * page, page) is None
        del view
    assert unreadable_at(0, 1) == 0
