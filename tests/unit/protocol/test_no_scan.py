"""One receive, one send or one heartbeat does not walk through all that is alive."""

from pdxfer.protocol.state import State
from tests.support.transfers import open_room, pair, receive, send


class Unwalked(dict):
    """A dict that nobody may walk through."""

    def _refuse(self):
        raise AssertionError("all live transfers were walked through")

    __iter__ = keys = values = items = _refuse


def unwalked(holders):
    live = Unwalked()
    for owner, name in holders:
        assert not getattr(owner, name)
        setattr(owner, name, live)
    return live


def test_live_transfers_are_found_and_not_looked_for():
    cluster, prefill, decode = pair()
    receives, sends = decode.machine._receives, prefill.machine._sends
    unwalked([(decode.machine, "live"), (receives, "live"), (receives.index, "live")])
    unwalked([(prefill.machine, "sendings"), (sends, "live")])
    for slot, ids in enumerate([(1, 2), (3, 4), (5, 6), (7, 8)]):
        receive(cluster, decode, room=slot + 1, ids=ids, slot=slot)
        open_room(cluster, prefill, room=slot + 1, slot=slot)
    cluster.run()
    for node in (prefill, decode):
        node.heartbeats()
    assert decode.machine.named_links
    send(prefill, slot=0)
    decode.machine.abort(0, 1, "enough", cluster.now)
    decode.pump()
    prefill.machine.abort(0, 2, "enough")
    prefill.pump()
    cluster.run()
    states = [decode.shown[0, slot].state for slot in range(4)]
    assert states == [State.COMMITTED, State.FAILED, State.FAILED, State.READY]
    cluster.network.leave(decode, prefill.machine.incarnation)
    cluster.run()
    assert decode.shown[0, 3].state is State.FAILED
    assert not receives.index.links
    assert not receives.index.of_worker(0)
    assert not receives.index.of_peer(prefill.machine.incarnation)


def test_what_waits_for_sends_leaves_nothing_behind():
    cluster, prefill, decode = pair()
    sends = prefill.machine._sends
    for slot in range(3):
        receive(cluster, decode, room=slot + 1, ids=(slot + 1,), slot=slot)
    cluster.run()
    assert len(sends.waited) == 3
    open_room(cluster, prefill, room=1)
    decode.machine.abort(0, 1, "enough", cluster.now)
    decode.pump()
    cluster.run()
    assert len(sends.waited) == 1
    cluster.network.leave(decode, prefill.machine.incarnation, goodbye=True)
    cluster.run()
    assert not sends.waited
