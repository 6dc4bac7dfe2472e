"""Every bound and every default deadline, in one place, with its unit in its name.

A number that bounds a queue, a message or a wait lives here and nowhere else. The table in
`docs/limits.md` is generated from this file and held equal to it by a test.
"""

from __future__ import annotations

from typing import Final

# -- control plane ---------------------------------------------------------------------------
CONTROL_MESSAGE_BYTES_MAX: Final = (32 << 20) + (64 << 10)
"""Largest control message; ZMQ_MAXMSGSIZE. Holds 4 M packed 64-bit page ids and their message."""
CONTROL_ARRAY_ITEMS_MAX: Final = 65_536
"""Items of one array in a message; holds every plane of a layout."""
CONTROL_MAP_ITEMS_MAX: Final = 65_536
"""Entries of one map in a message."""
CONTROL_TEXT_BYTES_MAX: Final = 1 << 20
"""Bytes of one string in a message; holds the text of any refusal."""
CONTROL_SEND_QUEUE_MESSAGES: Final = 16_384
"""ZMQ_SNDHWM: messages that ZeroMQ queues for one peer; more wait in order in the session."""
CONTROL_RECEIVE_QUEUE_MESSAGES: Final = 16_384
"""ZMQ_RCVHWM."""
CONTROL_LINGER_MS: Final = 1_000
"""How long a closing socket goes on sending what was queued (the last `Bye`)."""
CONTROL_HEARTBEAT_INTERVAL_MS: Final = 1_000
"""ZMQ_HEARTBEAT_IVL."""
CONTROL_HEARTBEAT_TIMEOUT_MS: Final = 5_000
"""ZMQ_HEARTBEAT_TIMEOUT."""
CONTROL_SOCKETS_MAX: Final = 4_096
"""ZMQ_MAX_SOCKETS of the agent's context."""
CONTROL_HANDSHAKE_TIMEOUT_MS: Final = 5_000
"""ZMQ_HANDSHAKE_IVL and ZMQ_CONNECT_TIMEOUT: a connection that is not ready by then is dropped."""
CONTROL_RECONNECT_MS: Final = 50
"""ZMQ_RECONNECT_IVL: first wait before connecting again; doubles."""
CONTROL_RECONNECT_MAX_MS: Final = 1_000
"""ZMQ_RECONNECT_IVL_MAX."""
CONTROL_REFUSED_RETRY_S: Final = 5.0
"""A link whose handshake or session was refused tries again after this."""
CONTROL_HELLO_INTERVAL_S: Final = 0.5
"""An unanswered `Hello` is repeated after this."""
CONTROL_BLOCKED_RETRY_S: Final = 0.05
"""Backstop: frames that a full queue refused are tried again after this at the latest."""
CONTROL_SESSIONS_MAX: Final = 2_048
"""Decode agents that one prefill agent serves at a time."""
CONTROL_BOUND_KEYS_MAX: Final = 65_536
"""Routing ids whose first CURVE key is remembered; the oldest without a session is forgotten."""
CONTROL_KEYS_CHECK_S: Final = 1.0
"""How often a prefill agent looks whether its allow-list of keys has changed. The sessions of a key
that is not in it any more end then, and their transfers with them."""
CONTROL_KEYS_UNREADABLE_S: Final = 30.0
"""How long sessions go on while the allow-list cannot be read; nobody new is let in meanwhile."""
CONTROL_FRAMES_PER_WAKE_MAX: Final = 512
"""Frames read before the event loop gets its turn again."""
CONTROL_UNACKED_MESSAGES_MAX: Final = 4_096
"""Messages kept for resending; more unacknowledged ones end the session."""
CONTROL_UNACKED_BYTES_MAX: Final = 256 << 20
"""Bytes kept for resending; more unacknowledged ones end the session."""
CONTROL_UNACKED_BYTES_AGENT_MAX: Final = 1 << 30
"""Bytes that a prefill agent keeps for resending to all its decode agents together; the session
that holds most of more ends."""
CONTROL_UNACKED_S: Final = 60.0
"""A session ends whose peer is heard and has acknowledged nothing for so long: it does not read."""
CONTROL_ACK_EVERY_MESSAGES: Final = 32
"""So many received messages are acknowledged at once."""
CONTROL_RESEND_BURST_MESSAGES: Final = 64
"""Messages sent again at a time; the next burst follows the acknowledgement of this one."""
CONTROL_RESEND_BURST_BYTES: Final = 16 << 20
"""Bytes sent again at a time, or one message where that is larger."""
CONTROL_RESEND_AGE_S: Final = 0.1
"""Where the receiver reports a gap, messages sent longer ago than this are sent again."""
CONTROL_RESEND_AFTER_MAX_S: Final = 4.0
"""Upper end of the doubling of `CONTROL_RESEND_AFTER_S`."""
CONTROL_ACK_DELAY_S: Final = 0.2
"""A received message is acknowledged by the next one sent, or after this."""
CONTROL_RESEND_AFTER_S: Final = 1.0
"""An unacknowledged message is sent again after this."""

# -- sessions and liveness -------------------------------------------------------------------
HEARTBEAT_INTERVAL_S: Final = 1.0
"""How often each side of a session says that it lives and how far it is."""
LIVENESS_TIMEOUT_S: Final = 10.0
"""A peer silent for this long is away: its transfers start to abort. `LEASE_S` while its end of the
connection answers: then its process lives and is only busy."""
CONNECT_TIMEOUT_S: Final = 5.0
"""Default of `DecodeClient.connect`."""
LINK_RETRY_S: Final = 1.0
"""A refused link is asked for again after this."""
LINK_PROBLEM_INTERVAL_S: Final = 0.5
"""How often a link that nobody answers says why, for those who wait for it (`connect`, rooms with
`unreachable_s`)."""
LINK_IDLE_S: Final = 300.0
"""A prefill address that nobody answers and no room names is called for so long."""
LINKS_PER_AGENT_MAX: Final = 256
"""Prefill addresses that a decode agent keeps links to."""
NEIGHBOUR_TIMEOUT_S: Final = 5.0
"""Two agents that seem to be on one host have so long to prove it over a Unix socket; then decode
takes a lane that needs no such proof."""
NEIGHBOURS_UNPROVEN_MAX: Final = 64
"""Connections to an agent's socket for neighbours with nothing proven yet; more are closed."""
PATH_OPEN_TIMEOUT_S: Final = 10.0
"""Opening a lane to a peer (address exchange, first flush)."""

# -- transfers -------------------------------------------------------------------------------
UNMATCHED_DEADLINE_S: Final = 120.0
"""Default deadline of a send or a receive whose other side has not come."""
NO_PROGRESS_DEADLINE_S: Final = 300.0
"""How long a matched transfer may stand still. Prefill waits for its worker's next chunk, or for
the lane to flush; decode waits for a sign that bytes move (a chunk, the progress in a heartbeat, a
commit). The side that has waited so long fails the transfer, retryable, and fences it like any
other failure."""
LEASE_S: Final = 30.0
"""Default lease of a matched send, renewed by decode's heartbeats."""
DRAIN_DEADLINE_S: Final = 10.0
"""How long decode waits for `Drained` before a transfer is shown as QUARANTINED."""
TRANSFERS_PER_WORKER_MAX: Final = 4_096
"""Live transfers of one worker; also the slots of its status board."""
UNMATCHED_PER_SESSION_MAX: Final = 4_096
"""Receives of one decode agent waiting at a prefill agent for their send."""
PROGRESS_PER_HEARTBEAT_MAX: Final = 4_096
"""Transfers whose progress one heartbeat of a prefill agent tells; more follow in the next one."""
ENDED_RECEIVES_MAX: Final = 65_536
"""Receives that ended before their send came, remembered at a prefill agent so that the send ends
with the same error when it comes; the oldest is forgotten first, each after
`UNMATCHED_DEADLINE_S`."""
REASON_CHARACTERS_MAX: Final = 4_096
"""Of the reason of a peer's abort, what is kept and told to a worker."""
PLACED_BYTES_PER_SESSION_MAX: Final = 1 << 30
"""Bytes of page ids that one decode agent may have placed at a prefill agent, of receives that wait
for their sends and of live ones; more are refused, and may be received again later."""
PLACED_BYTES_MAX: Final = 4 << 30
"""The same for all decode agents of a prefill agent together."""
TOMBSTONES_PER_SESSION_MAX: Final = 65_536
"""Aborted generations remembered above the session's mark."""
AUX_BYTES_MAX: Final = 64 << 10
"""Largest `aux` of a transfer."""
COMMIT_BYTES_MAX: Final = AUX_BYTES_MAX + 4_096
"""Largest commit payload on a lane."""
QUARANTINED_SHARE_MAX: Final = 0.25
"""Share of a pool's pages that may be quarantined before new receives are refused."""
PAGES_PER_MESSAGE_MAX: Final = 1 << 22
"""Page ids in one message, after unpacking: those of one call, all its groups together."""
CHUNKS_PER_TRANSFER_MAX: Final = 65_536
"""Calls of `send` for one room."""
SEGMENT_BYTES: Final = 1 << 20
"""A fixed interval of a chunk's canonical order."""

# -- layouts ---------------------------------------------------------------------------------
VERDICTS_KEPT_MAX: Final = 1_024
"""Verdicts on a worker and the instance it joins with that a peer's record keeps, the last used."""
TOLD_PLANES_MAX: Final = 65_536
"""Planes of all workers in one message of a peer: what checking them may cost the loop."""
PLANES_MAX: Final = 65_536
"""Planes of one layout."""
REGIONS_MAX: Final = 16_384
"""Regions of one layout."""
GROUPS_MAX: Final = 64
"""Groups of one layout."""
RUNS_PER_PAGE_MAX: Final = 1 << 20
"""Runs that the cells of one page may be cut into."""
RUNS_PER_REQUEST_MAX: Final = 1 << 26
"""Runs of one chunk; more must be sent in smaller chunks."""
WORKERS_PER_AGENT_MAX: Final = 256
"""Workers attached to one agent."""
RANKS_PER_INSTANCE_MAX: Final = 4_096
"""tp_size * pp_size * cp_size."""

# -- data plane ------------------------------------------------------------------------------
WINDOW_BYTES: Final = 16 << 20
"""Bytes in flight per endpoint."""
INTERVAL_RUNS: Final = 16_384
"""Runs of a chunk that are planned and posted at once; then other rooms have a turn."""
INTERVALS_IN_FLIGHT: Final = 2
"""Intervals of one room and source worker that a lane has at once, where a chunk has several."""
WINDOW_DESCRIPTORS_MIN: Final = 256
"""Descriptors in flight per endpoint that the byte window never cuts below."""
BATCH_BYTES: Final = 16 << 20
"""Envelope runs are flushed in batches of about this size."""
SPIN_US: Final = 30
"""How long the progress thread spins after its last event before it sleeps."""
ENGINE_CLOSE_DEADLINE_S: Final = 5.0
"""Closing an engine: drain, then force."""

# -- memory ----------------------------------------------------------------------------------
PREFAULT_SLICE_BYTES: Final = 256 << 20
"""Shared memory is touched in slices of this size, with a progress report after each."""

# -- local socket ----------------------------------------------------------------------------
LOCAL_MESSAGE_BYTES_MAX: Final = (32 << 20) + (1 << 20)
"""Largest message between a worker and its agent."""
LOCAL_FDS_MAX: Final = 64
"""File descriptors in one local message."""
LOCAL_REQUEST_TIMEOUT_S: Final = 10.0
"""Default `timeout_s` of a client."""
LOCAL_QUEUE_BYTES_MAX: Final = 64 << 20
"""What an agent queues for a worker that does not read before it drops that worker."""
FINISHED_KEPT_MAX: Final = 65_536
"""Ended transfers that a client keeps for `finished()`; when it is never called, older ones drop
out of that list (the transfers themselves stay valid)."""
STATUS_TRANSFERS_MAX: Final = 256
"""Transfers that `pdxfer status` lists one by one."""
DAEMON_DRAIN_DEADLINE_S: Final = 15.0
"""SIGTERM: how long a daemon lets running transfers finish."""

# -- commands --------------------------------------------------------------------------------
DAEMON_CLOSE_SLACK_S: Final = 15.0
"""How long past its drain deadline a stopping daemon is given to close engines and sockets."""
DESCRIPTORS_CHECK_S: Final = 2.0
"""How often a daemon counts its open file descriptors."""
DESCRIPTORS_FEW_SHARE: Final = 0.8
"""Share of RLIMIT_NOFILE from which on a daemon says that descriptors are few."""
DAEMON_READY_TIMEOUT_S: Final = 30.0
"""How long demo and bench wait for the ready file of a daemon they started."""
CHILD_START_TIMEOUT_S: Final = 300.0
"""How long they wait for a worker process to load its model or fill its memory."""
CHILD_STEP_TIMEOUT_S: Final = 120.0
"""How long they wait for one answer of a worker process."""
CHILD_STOP_TIMEOUT_S: Final = 20.0
"""How long a process that was asked to end may take before it is killed."""
