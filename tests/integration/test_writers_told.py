"""A decode worker knows who may write into its pages before they can."""

import os
import select

import pytest

from pdxfer.fabric.lanes import LANES
from pdxfer.local.messages import TransferWriters, Writer
from pdxfer.wire.messages import Place, Receive
from tests.support.agents import DESTINATION_PAGES, TOKENS, Both, until


def record(decode):
    """Everything that decode says to its worker and to prefill, in order."""
    said = []
    (port,) = decode.ports.values()
    (link,) = decode._links._links.values()
    to_worker, to_prefill = port.connection.send, link.send

    def worker(message, fds=()):
        said.append((message, [os.dup(fd) for fd in fds]))
        to_worker(message, fds)

    def prefill(message):
        said.append((message, list(port.board._live.values())))
        to_prefill(message)

    port.connection.send, link.send = worker, prefill
    return said


def position(said, *kinds):
    return next(index for index, (message, _) in enumerate(said) if isinstance(message, kinds))


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("late", [True, False])
async def test_a_worker_is_told_its_writers_before_they_are_told_its_pages(tmp_path, silent, late):
    both = Both(tmp_path, silent=silent)
    async with both.workers() as (sender, reader, _, _):
        decode, prefill = both.agents["decode"], both.agents["prefill"]
        async with both.moving():
            await reader.connect(sender.addresses, timeout_s=20)
        said = record(decode)
        if late:
            await sender.send(2, [1, 2], tokens=32)
            receiving = await reader.receive(2, sender.addresses)
            await until(lambda: any(isinstance(m, Receive) for m, _ in said))
            assert not any(isinstance(m, Writer) for m, _ in said)
            await receiving.place([5, 6], tokens=32)
        else:
            await reader.receive(2, sender.addresses, DESTINATION_PAGES, tokens=TOKENS)
        told = lambda: [i for i, (m, _) in enumerate(said) if carries_pages(m)]  # noqa: E731
        await until(told)
        rows = [entry for _, entry in said[told()[0]][1]]
        assert [(row.lane_code, row.peer_incarnation, row.peer_count) for row in rows] == [
            (LANES["inproc"].board_code, prefill.incarnation, 0 if silent else 1)
        ]
        assert rows[0].generation > 0
        handed = [(m, fds) for m, fds in said if isinstance(m, Writer)]
        assert len(handed) == (0 if silent else 1)
        if not silent:
            assert position(said, Writer) < told()[0]
            [(writer, [pidfd])] = handed
            assert writer.incarnation == prefill.incarnation
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(0) == []
            os.close(pidfd)
        await reader.receive(3, sender.addresses, [50, 51], tokens=32)
        assert sum(isinstance(m, Writer) for m, _ in said) == len(handed)
        assert not any(isinstance(m, TransferWriters) for m, _ in said)


def carries_pages(message):
    return isinstance(message, Place) or (
        isinstance(message, Receive) and message.place is not None
    )
