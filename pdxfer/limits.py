"""Every bound and every default deadline, in one place, with its unit in its name.

A number that bounds a queue, a message or a wait lives here and nowhere else. The table in
`docs/limits.md` is generated from this file and held equal to it by a test.
"""

from __future__ import annotations

from typing import Final

# -- control plane ---------------------------------------------------------------------------
CONTROL_MESSAGE_BYTES_MAX: Final = (32 << 20) + (64 << 10)
"""Size of one control message, which holds 4 M packed 64-bit page ids and their envelope. A sender
refuses a larger one with a `ResourceError` before it leaves; ZeroMQ (ZMQ_MAXMSGSIZE) drops the
connection that a larger one comes on."""
CONTROL_ARRAY_ITEMS_MAX: Final = 65_536
"""Items of one array in a control message, enough for every plane of a layout. A message with more
is a `RemoteProtocolError` at its receiver, and its session ends."""
CONTROL_MAP_ITEMS_MAX: Final = 65_536
"""Entries of one map in a control message. A message with more is a `RemoteProtocolError` at its
receiver, and its session ends."""
CONTROL_TEXT_BYTES_MAX: Final = 1 << 20
"""Bytes of one string in a control message, enough for the text of any refusal. A message with a
longer one is a `RemoteProtocolError` at its receiver, and its session ends."""
CONTROL_SEND_QUEUE_MESSAGES: Final = 16_384
"""Messages that ZeroMQ queues for one peer (ZMQ_SNDHWM). Nothing is refused above it: further
messages wait in order in the session until the queue takes them."""
CONTROL_RECEIVE_QUEUE_MESSAGES: Final = 16_384
"""Messages of one peer that ZeroMQ holds until the agent reads them (ZMQ_RCVHWM). Above it ZeroMQ
stops reading that connection, and messages wait at their sender."""
CONTROL_LINGER_MS: Final = 1_000
"""A socket that closes waits so long for its queued messages (the last is a `Bye`) to leave. What
has not left by then is dropped; the peer then finds the end of the session by its silence."""
CONTROL_HEARTBEAT_INTERVAL_MS: Final = 1_000
"""How often ZeroMQ pings the other end of a connection (ZMQ_HEARTBEAT_IVL). The answer comes from a
thread of ZeroMQ, so it shows that the process lives, not that the agent is free."""
CONTROL_HEARTBEAT_TIMEOUT_MS: Final = 5_000
"""ZeroMQ waits so long for the answer to a ping (ZMQ_HEARTBEAT_TIMEOUT). Then it drops the
connection and connects again; the session goes on."""
CONTROL_SOCKETS_MAX: Final = 4_096
"""ZeroMQ sockets of one process (ZMQ_MAX_SOCKETS). Every link of a decode agent has two; a link for
which no socket is left is refused with a retryable `ResourceError`."""
CONTROL_HANDSHAKE_TIMEOUT_MS: Final = 5_000
"""ZeroMQ waits so long for a new connection to be established and to finish its handshake
(ZMQ_CONNECT_TIMEOUT, ZMQ_HANDSHAKE_IVL). One that is not ready by then is dropped, and decode
connects again."""
CONTROL_RECONNECT_MS: Final = 50
"""After a lost connection ZeroMQ waits so long before it connects again (ZMQ_RECONNECT_IVL). The
wait doubles with every failure, up to `CONTROL_RECONNECT_MAX_MS`."""
CONTROL_RECONNECT_MAX_MS: Final = 1_000
"""Longest wait of ZeroMQ before it connects again (ZMQ_RECONNECT_IVL_MAX)."""
CONTROL_REFUSED_RETRY_S: Final = 5.0
"""A decode agent whose handshake or session a prefill agent refused (an unknown key, another
version) waits so long. Then it tries the same address again."""
CONTROL_HELLO_INTERVAL_S: Final = 0.5
"""A decode agent waits so long for the answer to its `Hello`. Then it says `Hello` again, until it
is answered or the link is dropped."""
CONTROL_BLOCKED_RETRY_S: Final = 0.05
"""When a full queue of ZeroMQ has refused a frame, the agent is told once there is room. It tries
again after this at the latest, in case it is not told."""
CONTROL_SESSIONS_MAX: Final = 2_048
"""Decode agents that one prefill agent serves at a time. The next one is refused with a retryable
`ResourceError`."""
CONTROL_BOUND_KEYS_MAX: Final = 65_536
"""Incarnations of which a prefill agent remembers the first CURVE key, so that no other key speaks
for them. Above it the oldest one without a session is forgotten; nobody is refused."""
CONTROL_KEYS_CHECK_S: Final = 1.0
"""How often a prefill agent looks whether its allow-list of keys has changed. A key that was taken
off the list loses its sessions then, and their transfers fail."""
CONTROL_KEYS_UNREADABLE_S: Final = 30.0
"""While its allow-list cannot be read, a prefill agent lets nobody new in, and waits so long for
the list to be readable again. Then it ends the sessions that it has, and their transfers fail."""
CONTROL_FRAMES_PER_WAKE_MAX: Final = 512
"""Control frames that an agent reads in one go. Then its workers, lanes and timers have their turn
before it reads on."""
CONTROL_UNACKED_MESSAGES_MAX: Final = 4_096
"""Messages that one session keeps for resending, because its peer has not acknowledged them. With
one more the session ends with a retryable `PeerError`; decode begins a new one."""
CONTROL_UNACKED_BYTES_MAX: Final = 256 << 20
"""Bytes that one session keeps for resending, because its peer has not acknowledged them. With more
the session ends with a retryable `PeerError`; decode begins a new one."""
CONTROL_UNACKED_BYTES_AGENT_MAX: Final = 1 << 30
"""Bytes that a prefill agent keeps for resending to all its decode agents together. Above it the
session that holds the most of them ends."""
CONTROL_UNACKED_S: Final = 60.0
"""An agent waits so long for a peer that is heard to acknowledge any of what was sent to it. Then
the session ends: the peer talks and does not read."""
CONTROL_ACK_EVERY_MESSAGES: Final = 32
"""A receiver acknowledges at once when it has received so many messages since its last
acknowledgement."""
CONTROL_RESEND_BURST_MESSAGES: Final = 64
"""Messages sent again at a time; the next burst follows the acknowledgement of this one."""
CONTROL_RESEND_BURST_BYTES: Final = 16 << 20
"""Bytes sent again at a time. A single message that is larger is a burst by itself."""
CONTROL_RESEND_AGE_S: Final = 0.1
"""Where the receiver reports a gap, only messages that were sent longer ago than this are sent
again; younger ones may still be on their way."""
CONTROL_RESEND_AFTER_MAX_S: Final = 4.0
"""Longest wait between two times that the same message is sent again: `CONTROL_RESEND_AFTER_S`
doubles up to this."""
CONTROL_ACK_DELAY_S: Final = 0.2
"""A receiver waits so long for a message of its own that can carry the acknowledgement. Then it
acknowledges by a message that says nothing else."""
CONTROL_RESEND_AFTER_S: Final = 1.0
"""A sender waits so long for the acknowledgement of its oldest message. Then it sends that message
again, and waits twice as long for the next time."""

# -- sessions and liveness -------------------------------------------------------------------
HEARTBEAT_INTERVAL_S: Final = 1.0
"""How often each agent of a session says that it lives, and how far its transfers are."""
LIVENESS_TIMEOUT_S: Final = 10.0
"""An agent waits so long for a sign of its peer, or `LEASE_S` while ZeroMQ's pings show that the
peer's process lives and is only busy. Then the session ends, and the agent fails the transfers of
that peer with a retryable `PeerError`; decode fences their pages like those of any other
failure."""
CONNECT_TIMEOUT_S: Final = 5.0
"""Default of `DecodeClient.connect`: how long the worker waits for all ranks of the prefill
instance to be attached and compared. Then `connect` raises the error that says what is missing."""
LINK_RETRY_S: Final = 1.0
"""A decode agent waits so long after a prefill agent has refused its link. Then it asks again."""
LINK_PROBLEM_INTERVAL_S: Final = 0.5
"""How often a decode agent tells why a prefill address does not answer to those who wait for it:
`connect`, and receives with `unreachable_s`."""
LINK_IDLE_S: Final = 300.0
"""A decode agent goes on calling a prefill address that does not answer, and that no receive names,
for so long. Then it drops the link; the next receive that names the address makes a new one."""
LINKS_PER_AGENT_MAX: Final = 256
"""Prefill addresses that a decode agent keeps links to. For one more, the link that was idle for
longest is dropped; where all are in use, the receive or `connect` is refused with a retryable
`ResourceError`."""
NEIGHBOUR_TIMEOUT_S: Final = 5.0
"""Two agents that seem to be on one host wait so long for each other's proof over a Unix socket.
Then decode takes a lane that needs no such proof, such as `tcp`."""
NEIGHBOURS_UNPROVEN_MAX: Final = 64
"""Connections to an agent's socket for neighbours on which nothing has been proven yet. One more is
closed at once, and its agent takes a lane that needs no proof."""
PATH_OPEN_TIMEOUT_S: Final = 10.0
"""A prefill agent waits so long for a path of a lane to a decode agent (connection, exchange of
addresses, first flush). Then the path is closed, and its rooms fail or take the next lane that both
have."""

# -- transfers -------------------------------------------------------------------------------
UNMATCHED_DEADLINE_S: Final = 120.0
"""Default `deadline_s`: how long a send waits for the receives of its room, or a receive for the
sends of its room. Then the one that waited fails with a retryable `PeerError` that says who did not
come."""
NO_PROGRESS_DEADLINE_S: Final = 300.0
"""How long a matched transfer may stand still. Prefill waits for its worker's next chunk or layer,
or for the lane to flush; decode waits for a sign that bytes move (a chunk, the progress in a
heartbeat, a commit). The side that has waited so long fails the transfer with a retryable
`PeerError`, and fences it like any other failure."""
LEASE_S: Final = 30.0
"""Default `lease_s`: how long a matched send waits for a sign of its decode agent; every message of
the session renews it. Then prefill fails the send and stops writing. At decode this frees no
page."""
FENCE_DEADLINE_S: Final = 10.0
"""Decode waits so long for the proof that no write of a failed transfer can land. Then the transfer
is shown as QUARANTINED and its pages stay blocked; a proof that comes later still gives them
back."""
TRANSFERS_PER_WORKER_MAX: Final = 4_096
"""Live transfers of one worker, which are also the slots of its status board. One more is refused
by the client with a retryable `ResourceError`."""
UNMATCHED_PER_SESSION_MAX: Final = 4_096
"""Receives of one decode agent that wait at a prefill agent for their sends. One more fails with a
retryable `ResourceError`."""
PROGRESS_PER_HEARTBEAT_MAX: Final = 4_096
"""Transfers whose progress one heartbeat of a prefill agent tells. Those beyond it are in the next
heartbeat."""
FAILED_SENDS_MAX: Final = 65_536
"""Sends that failed before every receiver of their rooms had come, remembered at a prefill agent so
that those receivers hear why. Each is forgotten after `UNMATCHED_DEADLINE_S`, the oldest sooner
where there are more; a receive that comes after that waits for another send."""
ENDED_RECEIVES_MAX: Final = 65_536
"""Receives that ended before their sends came, remembered at a prefill agent so that those sends
end at once with the same error. Each is forgotten after `UNMATCHED_DEADLINE_S`, the oldest sooner
where there are more; a send that comes after that waits for its own deadline."""
REASON_CHARACTERS_MAX: Final = 4_096
"""Characters of the reason of an abort, by a peer or by a worker, that are kept and told. The rest
is cut off."""
PLACED_BYTES_PER_SESSION_MAX: Final = 1 << 30
"""Bytes of page ids that one decode agent may have placed at a prefill agent, in receives that wait
for their sends and in live ones. A receive above it fails with a retryable `ResourceError`."""
PLACED_BYTES_MAX: Final = 4 << 30
"""Bytes of page ids that all decode agents together may have placed at a prefill agent, in receives
that wait for their sends and in live ones. A receive above it fails with a retryable
`ResourceError`."""
GIVEN_BYTES_PER_WORKER_MAX: Final = 1 << 30
"""Bytes that an agent keeps of what one worker has given with its live transfers: page ids, skipped
ranges, layers, `aux`, and `GIVEN_RECORD_BYTES` a call. A transfer above it fails with a retryable
`ResourceError`; what it had taken comes back when it has ended."""
GIVEN_BYTES_MAX: Final = 4 << 30
"""Bytes that an agent keeps of what all its workers have given with their live transfers, counted
as for one worker. A transfer above it fails with a retryable `ResourceError`."""
GIVEN_RECORD_BYTES: Final = 1_024
"""What each chunk and each list of places counts in the budget of its worker beside its own bytes,
since many small ones take memory too. It refuses nothing by itself."""
TOMBSTONES_PER_SESSION_MAX: Final = 65_536
"""Ended generations above decode's mark that a prefill agent remembers for a session. The message
that would need one more is a `RemoteProtocolError`, and the session ends: decode's heartbeats have
not raised the mark."""
AUX_BYTES_MAX: Final = 64 << 10
"""Bytes of the `aux` of one transfer. A longer one is refused at the call with a
`ResourceError`."""
COMMIT_BYTES_MAX: Final = AUX_BYTES_MAX + 4_096
"""Bytes of the commit that follows the last byte on a lane: the largest `aux` and what stands
around it. A larger one is not sent; one that comes from a peer closes its lane."""
QUARANTINED_SHARE_MAX: Final = 0.25
"""Share of the pages of one group that may be quarantined. Above it new receives of that worker are
refused with a retryable `ResourceError`."""
PAGES_PER_MESSAGE_MAX: Final = 1 << 22
"""Page ids of one call, all its groups together. A call with more is refused with a
`ResourceError`; send in chunks."""
CHUNKS_PER_TRANSFER_MAX: Final = 65_536
"""Chunks of one room at one worker, which are its calls of `send`. One more is refused with a
`ResourceError`."""
SEGMENT_BYTES: Final = 1 << 20
"""Length of a segment, the fixed interval of a chunk's canonical order that lanes may name bytes
by. It refuses nothing."""

# -- layouts ---------------------------------------------------------------------------------
VERDICTS_KEPT_MAX: Final = 1_024
"""Verdicts on a source instance and a destination worker that an agent keeps for one peer. Above it
the one that was not used for longest is dropped, and computed again when it is needed."""
TOLD_PLANES_MAX: Final = 65_536
"""Planes of all workers in one message of a peer, since checking them takes the agent's time. A
message with more is a `RemoteProtocolError`, and the session ends."""
PLANES_MAX: Final = 65_536
"""Planes of one layout. A layout with more is refused with a `ConfigError` where it is made, and
with a `RemoteProtocolError` where a peer tells it."""
REGIONS_MAX: Final = 16_384
"""Regions of one layout. A layout with more is refused with a `ConfigError` where it is made, and
with a `RemoteProtocolError` where a peer tells it."""
GROUPS_MAX: Final = 64
"""Groups of one layout. A layout with more is refused with a `ConfigError` where it is made, and
with a `RemoteProtocolError` where a peer tells it."""
RUNS_PER_PAGE_MAX: Final = 1 << 20
"""Runs that the cells of one page are cut into between two layouts. A pair whose pages need more is
refused with a `ResourceError`."""
RUNS_PER_REQUEST_MAX: Final = 1 << 26
"""Runs that are planned for one chunk. A chunk that needs more fails with a `ResourceError`; send
it as several smaller ones."""
WORKERS_PER_AGENT_MAX: Final = 256
"""Workers attached to one agent. One more is refused with a retryable `ResourceError`; a peer that
names more ends its session with a `RemoteProtocolError`."""
RANKS_PER_INSTANCE_MAX: Final = 4_096
"""Ranks of one instance, tp_size * pp_size * cp_size. A rank of a larger one is refused with a
`ConfigError`."""

# -- data plane ------------------------------------------------------------------------------
WINDOW_BYTES: Final = 16 << 20
"""Bytes that one connection of a lane has in flight. Nothing is refused above it: further writes
wait until some have landed."""
INTERVAL_RUNS: Final = 16_384
"""Runs of a chunk that are planned and posted in one go. Then other rooms have a turn, so that a
large room does not hold up small ones."""
INTERVALS_IN_FLIGHT: Final = 2
"""Intervals of one room and source worker that a lane has at once, where a chunk has several. The
next one is planned when one of them is done."""
WINDOW_DESCRIPTORS_MIN: Final = 256
"""Writes that one connection of a lane may have in flight even where their bytes exceed its window,
so that a large write does not hold up small ones. Further writes wait."""
BATCH_BYTES: Final = 16 << 20
"""Bytes after which the runs of a plan of whole envelopes are flushed. A batch is about this long;
it refuses nothing."""
SPIN_US: Final = 30
"""How long the progress thread of a lane looks for further work after its last event. Then it
sleeps until the next event wakes it."""
ENGINE_CLOSE_DEADLINE_S: Final = 5.0
"""An agent that closes waits so long for one engine of a lane: half of it for writes to land, then
they are cut off. An engine whose thread has not ended by then raises a `ResourceError` and keeps
what it uses."""

# -- memory ----------------------------------------------------------------------------------
PREFAULT_SLICE_BYTES: Final = 256 << 20
"""Shared memory is touched in slices of this size, and progress is reported after each."""

# -- local socket ----------------------------------------------------------------------------
LOCAL_MESSAGE_BYTES_MAX: Final = (32 << 20) + (1 << 20)
"""Bytes of one message between a worker and its agent. A larger one is refused with a
`ResourceError` where it is sent; where it comes, the connection is closed."""
LOCAL_FDS_MAX: Final = 64
"""File descriptors that one message between a worker and its agent carries. A cache that lies in
more memfds is refused with a `ConfigError`."""
LOCAL_REQUEST_TIMEOUT_S: Final = 10.0
"""Default `timeout_s` of a client: how long it waits for an answer of its agent. Then the call
raises `DaemonUnavailableError`."""
LOCAL_QUEUE_BYTES_MAX: Final = 64 << 20
"""Bytes that an agent queues for a worker that does not read. Above it the agent closes the
connection, and the worker counts as gone."""
FINISHED_KEPT_MAX: Final = 65_536
"""Ended transfers that a client lists for `finished()`. Where it is never called, the oldest drop
out of the list; the transfers themselves stay valid."""
STATUS_TRANSFERS_MAX: Final = 256
"""Transfers that `pdxfer status` lists one by one, quarantined ones first. The others are only
counted."""
DAEMON_DRAIN_DEADLINE_S: Final = 15.0
"""Default `drain_deadline_s`: how long a daemon that got SIGTERM or SIGINT waits for running
transfers to finish. Then it ends them, closes, and exits with code 4."""

# -- commands --------------------------------------------------------------------------------
DAEMON_CLOSE_SLACK_S: Final = 15.0
"""A stopping daemon waits so long past its drain deadline for engines and sockets to close. Then it
exits with code 4 and leaves the rest to the kernel."""
DESCRIPTORS_CHECK_S: Final = 2.0
"""How often a daemon counts its open file descriptors."""
DESCRIPTORS_FEW_SHARE: Final = 0.8
"""Share of RLIMIT_NOFILE. A daemon that has so many descriptors open logs the event
`descriptors_few`; it refuses nothing yet."""
DAEMON_READY_TIMEOUT_S: Final = 30.0
"""The demo and the bench wait so long for the ready file of a daemon that they started. Then they
end with an error that shows the daemon's log."""
CHILD_START_TIMEOUT_S: Final = 300.0
"""The demo and the bench wait so long for a worker process to load its model or to fill its memory.
Then they end with an error that names the process."""
CHILD_STEP_TIMEOUT_S: Final = 120.0
"""The demo and the bench wait so long for one answer of a worker process. Then they end with an
error that names the process."""
CHILD_STOP_TIMEOUT_S: Final = 20.0
"""The demo, the bench and `pdxfer doctor` wait so long for a process of theirs that was asked to
end. Then they kill it."""
