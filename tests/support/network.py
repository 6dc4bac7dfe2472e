"""The control channel between the nodes of a cluster: real sessions over connections that break.

The sessions are `pdxfer.control.session`, used as `control.link` and `control.server` use them. A
connection keeps order while it lives. Where it breaks, what was on its way is lost from some point
on, in each direction; either side goes on over the next one, and decode notices that later.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdxfer.control.session import Belonging, Session, stale_answer
from pdxfer.wire import codec
from pdxfer.wire.messages import Bye, Hello, Message, StaleSession
from pdxfer.wire.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from tests.support.cluster import Cluster, Node

Way = tuple[bytes, bytes]
"""(sender, receiver)."""


class Network:
    """The sessions of all pairs, and the frames between them."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.frames: dict[Way, deque[bytes]] = {}
        """On their way."""
        self.cut: set[Way] = set()
        """Directions that keep their frames for later."""
        self.lost: set[Way] = set()
        """Directions that lose every frame."""
        self.sessions: dict[Way, Session] = {}
        """(owner, peer) to the owner's end."""
        self.unnoticed: set[Way] = set()
        """(decode, prefill) whose connection was replaced, which decode has not seen yet."""
        self.addresses: dict[Way, str] = {}
        """(decode, prefill) to the address that decode reaches it at."""
        self.carried_bytes = 0
        """Of messages, each counted once."""
        self._counter = 0

    # -- sessions ----------------------------------------------------------------------------
    def join(self, decode: Node, prefill: Node, address: str) -> None:
        """Decode asks for a session; an earlier one is over at decode now, at prefill when it
        hears of this one."""
        way = (decode.machine.incarnation, prefill.machine.incarnation)
        self.addresses[way] = address
        self._end(decode, way[1], "a new session begins")
        self._ask(way)

    def leave(self, node: Node, peer: bytes, *, goodbye: bool = False) -> None:
        """A side gives its session up, and tells the peer or not."""
        if goodbye:
            self.carry(node, peer, Bye(reason="seeded"))
        self._end(node, peer, "the session was given up")

    def forget(self, life: bytes) -> None:
        """The process of a life is dead: it has no end of a session any more."""
        for way in [way for way in self.sessions if way[0] == life]:
            del self.sessions[way]

    def _ask(self, way: Way) -> None:
        self._counter += 1
        session = Session(way[0], None, self.cluster.now, session=self._counter)
        self.sessions[way] = session
        self._say_hello(way)

    def _say_hello(self, way: Way) -> None:
        hello = Hello(version=PROTOCOL_VERSION, role="decode")
        self._put(way, self.sessions[way].wrap(hello, self.cluster.now))

    def _answer(self, way: Way) -> None:
        hello = Hello(version=PROTOCOL_VERSION, role="prefill")
        self._put(way, self.sessions[way].wrap(hello, self.cluster.now))

    def _end(self, node: Node, peer: bytes, reason: str) -> None:
        session = self.sessions.pop((node.machine.incarnation, peer), None)
        if session is not None and session.remote is not None:
            node.session_lost(peer, reason)

    # -- what is sent ------------------------------------------------------------------------
    def carry(self, node: Node, peer: bytes, message: Message) -> None:
        """Send a message; without a session it goes nowhere, as with the agents."""
        way = (node.machine.incarnation, peer)
        session = self.sessions.get(way)
        if session is None or session.remote is None:
            return
        frame = session.wrap(message, self.cluster.now)
        self.carried_bytes += len(frame)
        self._put(way, frame)

    def _put(self, way: Way, frame: bytes) -> None:
        if way not in self.lost:
            self.frames.setdefault(way, deque()).append(frame)

    def _settle(self, way: Way) -> None:
        """What time asks for: repeats, acknowledgements."""
        session = self.sessions.get(way)
        if session is not None:
            for frame in session.due(self.cluster.now):
                self._put(way, frame)

    def tick(self) -> None:
        """Time has passed."""
        for way, session in list(self.sessions.items()):
            if session.remote is None:
                self._say_hello(way)
            else:
                self._settle(way)

    # -- connections -------------------------------------------------------------------------
    def break_connection(self, decode: bytes, prefill: bytes) -> None:
        """What was on its way is lost from some point on, in each direction."""
        for way in ((decode, prefill), (prefill, decode)):
            queue = self.frames.get(way, deque())
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()
        if (decode, prefill) in self.sessions:
            self.unnoticed.add((decode, prefill))

    def lose_all(self, decode: bytes, prefill: bytes) -> None:
        """The connection breaks, and nothing that was on its way arrives."""
        for way in ((decode, prefill), (prefill, decode)):
            self.frames.pop(way, None)
        self.unnoticed.add((decode, prefill))

    def notice_one(self) -> bool:
        """Decode sees that one of its connections was replaced."""
        if not self.unnoticed:
            return False
        way = self.rng.choice(sorted(self.unnoticed))
        self.unnoticed.discard(way)
        session = self.sessions.get(way)
        if session is None:
            return True
        if session.remote is None:
            self._say_hello(way)
        else:
            session.reconnected(self.cluster.now)
            self._settle(way)
        return True

    # -- what arrives ------------------------------------------------------------------------
    def waiting(self, way: Way) -> Iterator[Message]:
        """The messages on their way in one direction, in order."""
        for frame in self.frames.get(way, ()):
            message = codec.decode(frame).message
            if message is not None:
                yield message

    def deliver_one(self) -> bool:
        """The next frame of one direction arrives; False when none is on its way."""
        ways = [way for way, queue in self.frames.items() if queue and way not in self.cut]
        if not ways:
            return False
        self.deliver(self.rng.choice(ways))
        return True

    def deliver(self, way: Way) -> None:
        """The next frame of a direction arrives."""
        frame = self.frames[way].popleft()
        node = self.cluster.nodes.get(way[1])
        if node is None or node.dead:
            return
        take = self._take_at_prefill if node.is_prefill else self._take_at_decode
        take(node, way[0], codec.decode(frame))
        node.pump()
        self._settle((way[1], way[0]))

    def _take_at_prefill(self, node: Node, peer: bytes, envelope: codec.Envelope) -> None:
        way = (node.machine.incarnation, peer)
        session, message = self.sessions.get(way), envelope.message
        if isinstance(message, StaleSession):
            if session is not None and envelope.session == session.session:
                self._end(node, peer, "the peer does not know this session any more")
            return
        found = Belonging.STALE if session is None else session.belonging(envelope)
        if isinstance(message, Hello) and (session is None or found is Belonging.NEW_SESSION):
            self._end(node, peer, "the peer began a new session")
            now = self.cluster.now
            session = Session(way[0], peer, now, session=envelope.session)
            self.sessions[way] = session
            session.receive(envelope, now)
            node.session_began(peer, "")
            self._answer(way)
        elif session is None or found is not Belonging.CURRENT:
            self._put(way, stale_answer(way[0], envelope))
        elif isinstance(message, Hello):
            self._answer(way)
        else:
            self._act(node, peer, session, envelope)

    def _take_at_decode(self, node: Node, peer: bytes, envelope: codec.Envelope) -> None:
        way = (node.machine.incarnation, peer)
        session, message = self.sessions.get(way), envelope.message
        if session is None:
            return
        if isinstance(message, StaleSession):
            if envelope.session == session.session:
                self._end(node, peer, "the prefill agent gave this session up")
                self._ask(way)
        elif session.belonging(envelope) is not Belonging.CURRENT:
            self._put(way, stale_answer(way[0], envelope))
        elif session.remote is None and isinstance(message, Hello):
            session.receive(envelope, self.cluster.now)
            node.session_began(peer, self.addresses[way])
        else:
            self._act(node, peer, session, envelope)

    def _act(self, node: Node, peer: bytes, session: Session, envelope: codec.Envelope) -> None:
        way = (node.machine.incarnation, peer)
        for message in session.receive(envelope, self.cluster.now):
            if self.sessions.get(way) is not session:
                return  # it ended meanwhile
            if isinstance(message, Bye):
                self._end(node, peer, "the peer said goodbye")
                if not node.is_prefill:
                    self._ask(way)
            elif not isinstance(message, Hello):
                node.on_message(peer, message)
