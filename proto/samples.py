# ruff: noqa: INP001 (a script beside regen.py, no package)
"""The records behind the golden vectors: every message, and every choice of a field, once."""

from __future__ import annotations

from pdxfer.wire.messages import (
    Abort,
    Accept,
    AnyMessage,
    Attach,
    Bye,
    Chunk,
    CommitPayload,
    Committed,
    Drained,
    Envelope,
    Failed,
    GroupPages,
    Heartbeat,
    Hello,
    LaneFailed,
    Matched,
    PairPlan,
    PairReject,
    Place,
    Progress,
    RankInfo,
    Receive,
    RegionInfo,
    Reject,
    StaleSession,
    TokenRange,
    WorkerInfo,
)

PREFILL = bytes(range(16))
DECODE = bytes(range(0x80, 0x90))
OLDER_DECODE = bytes(range(0x70, 0x80))
LARGE = (1 << 64) - 1
LAYOUT: dict[str, object] = {
    "groups": [
        {"name": "full", "kind": "token", "page_size": 16, "pages": 1024, "reserved_pages": 1}
    ],
    "planes": [
        [0, "k", 0, 0, 0, 32768, 1024, 256, 0, 4, 4, 256, 16, "bfloat16", "token", ""],
        [0, "v", 0, 0, 16384, 32768, 1024, 256, 0, 4, 4, 256, 16, "bfloat16", "token", ""],
    ],
    "regions": [[33554432, 32768]],
    "dtype": "bfloat16",
    "model": "",
    "unified_memory": True,
    "relayout": "never",
}


def worker(worker_id: int, instance: str, address: int) -> WorkerInfo:
    """A worker with one page-major region."""
    return WorkerInfo(
        worker_id=worker_id,
        instance=instance,
        rank=RankInfo(tp=0, tp_size=1),
        layout=LAYOUT,
        regions=[
            RegionInfo(address=address, length_bytes=33554432, rkeys={"tcp": b"\x01\x02\xff"})
        ],
        item_lens=[32768],
        page_size=16,
        attention_tp=1,
        unified_memory=True,
        relayout="never",
        model="llama@1",
        ignore_parts=["draft.k"],
    )


PLACE = Place(
    generation=7,
    source_worker=0,
    tokens=300,
    prefix_tokens=32,
    groups={
        "full": GroupPages(
            first_token=32, encoding="i4", ids=bytes.fromhex("050000000900000001000000")
        ),
        "swa": GroupPages(
            first_token=256,
            encoding="r8",
            ids=bytes.fromhex("00000000010000000300000000000000"),
            skipped=bytes.fromhex("08010000000000001801000000000000"),
        ),
    },
)


def _from_decode(number: int, ack: int, message: AnyMessage | None) -> Envelope:
    return Envelope(
        source=DECODE, destination=PREFILL, session=2, number=number, ack=ack, message=message
    )


def _from_prefill(number: int, ack: int, message: AnyMessage | None) -> Envelope:
    return Envelope(
        source=PREFILL, destination=DECODE, session=2, number=number, ack=ack, message=message
    )


SAMPLES: dict[str, Envelope | CommitPayload] = {
    "hello_first": Envelope(
        source=DECODE,
        destination=b"",
        session=2,
        number=0,
        ack=0,
        message=Hello(version=0, role="decode"),
    ),
    "hello_answer": _from_prefill(
        0,
        0,
        Hello(
            version=0,
            role="prefill",
            features=["resume"],
            lanes=["cma", "tcp"],
            ucx_version="1.22.0",
            boot_id="3f1b",
            uid=1000,
            local_socket="/run/pdxfer/a.sock." + PREFILL.hex()[:8],
            nonce=bytes(range(16)),
        ),
    ),
    "attach": _from_decode(
        1,
        0,
        Attach(
            revision=1,
            workers=[worker(3, "decode-a", LARGE)],
            siblings=[worker(1, "prefill-a", 0)],
            lane="tcp",
            lane_address=b"\x00address",
        ),
    ),
    "accept": _from_prefill(
        1,
        1,
        Accept(
            revision=1,
            workers=[worker(0, "prefill-a", 0x7F0000000000)],
            plans=[PairPlan(source_worker=0, destination_worker=3, digest=bytes(range(32)))],
            rejects=[
                PairReject(
                    source_worker=0,
                    destination_worker=4,
                    code="layout_mismatch",
                    text="dtype: prefill=bfloat16, decode=float16",
                    fields={"dtype": "prefill=bfloat16, decode=float16"},
                )
            ],
            lane="tcp",
            lane_address=b"\x00sender",
        ),
    ),
    "lane_failed": _from_prefill(
        2, 1, LaneFailed(revision=1, lane="cma", text="no path: operation not permitted")
    ),
    "reject": _from_prefill(
        1,
        0,
        Reject(
            code="peer",
            text="protocol version: this agent speaks 0, the decode agent speaks 9",
            fields={"version": "here=0, peer=9"},
        ),
    ),
    "stale": _from_prefill(0, 0, StaleSession(incarnation=PREFILL)),
    "heartbeat": _from_decode(
        0,
        5,
        Heartbeat(
            after=9,
            oldest_live_generation=7,
            progress=[Progress(generation=7, bytes_done=1 << 40)],
        ),
    ),
    "bye": _from_prefill(9, 12, Bye(reason="SIGTERM")),
    "receive": _from_decode(
        2,
        1,
        Receive(
            room=LARGE,
            generation=7,
            source_worker=0,
            destination_worker=3,
            receiver_index=1,
            receiver_count=2,
        ),
    ),
    "receive_with_place": _from_decode(
        2,
        1,
        Receive(
            room=1,
            generation=7,
            source_worker=0,
            destination_worker=3,
            receiver_index=0,
            receiver_count=1,
            place=PLACE,
            must_exist=True,
        ),
    ),
    "place": _from_decode(3, 1, PLACE),
    "matched": _from_prefill(2, 3, Matched(generation=7, source_worker=0)),
    "chunk": _from_prefill(
        3,
        3,
        Chunk(
            generation=7,
            source_worker=0,
            number=0,
            ranges={"full": [TokenRange(first=32, end=304)]},
            layers=[0, 1, 2, 3],
            length_bytes=557056,
            last=False,
        ),
    ),
    "chunk_last": _from_prefill(
        4,
        3,
        Chunk(
            generation=7,
            source_worker=0,
            number=1,
            ranges={
                "swa": [TokenRange(first=256, end=264), TokenRange(first=280, end=300)],
                "full": [TokenRange(first=304, end=320)],
            },
            length_bytes=32768,
            last=True,
        ),
    ),
    "committed": _from_decode(4, 4, Committed(generation=7)),
    "failed": _from_prefill(
        5,
        4,
        Failed(
            generation=8,
            source_worker=0,
            code="transfer",
            text="room 5: tokens differ: prefill=300, decode=299",
            retryable=True,
            fields={"fence": "drained"},
        ),
    ),
    "abort": _from_decode(5, 5, Abort(generation=8, reason="aborted by the decode worker")),
    "abort_older_life": _from_decode(6, 5, Abort(decode_incarnation=OLDER_DECODE)),
    "drained": _from_prefill(6, 5, Drained(generation=8)),
    "drained_older_life": _from_prefill(7, 6, Drained(decode_incarnation=OLDER_DECODE)),
    "acknowledgement": _from_decode(0, 7, None),
    "resend_request": _from_decode(8, 7, None),
    "commit": CommitPayload(
        decode_incarnation=DECODE,
        generation=7,
        source_worker=0,
        sender_index=0,
        length_bytes=589824,
        runs=34,
        digest=bytes(range(32)),
        aux=b"first token \x00\xff",
    ),
}
