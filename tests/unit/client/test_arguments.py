"""Wrong arguments are refused by name, value and remedy, in the types that the clients promise."""

import asyncio
import dataclasses

import numpy as np
import pytest

from pdxfer import embedded, memory
from pdxfer.client import AsyncDecodeClient, AsyncPrefillClient, DecodeClient, PrefillClient, Rank
from pdxfer.errors import ConfigError, DaemonUnavailableError
from pdxfer.local.messages import AttachWorker, OpenReceive, OpenSend, WorkerHello
from tests.unit.client.conftest import SmallCache

PREFILL = "tcp://127.0.0.1:4711"


def refused(what, *texts):
    with pytest.raises(ConfigError) as raised:
        what()
    for text in texts:
        assert text in str(raised.value)


CLIENTS = [PrefillClient, DecodeClient, AsyncPrefillClient, AsyncDecodeClient]


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("agent", [None, 5, "", b"/run/prefill.sock", ["/run/prefill.sock"]])
def test_agent(kind, agent, cache):
    refused(
        lambda: kind(agent, cache),
        f"agent={agent!r}: must be the socket path of a running pdxfer-prefill or pdxfer-decode, "
        "or an agent of pdxfer.embedded",
    )


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("given", [None, 5, np.zeros(4), memory])
def test_cache_without_a_layout(kind, given):
    refused(lambda: kind("/run/a.sock", given), "cache=", "pool of pdxfer.pool", "KVLayout")


def test_a_tensor_is_no_cache():
    torch = pytest.importorskip("torch")  # its `layout` is another thing
    refused(lambda: PrefillClient("/run/a.sock", torch.zeros(2)), "cache=tensor([0., 0.]): must be")


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "cache.memory=None: "),
        (bytes(4096), "(bytes of 4096): "),
        ([np.zeros(4)], "cache.memory=[array("),
        (np.zeros(4), "cache.memory=array("),
        (5, "cache.memory=5: "),
    ],
)
def test_memory_of_another_type(kind, given, text, cache):
    cache.memory = given
    refused(lambda: kind("/run/a.sock", cache), text, "1 MemoryRange", "pdxfer.memory.allocate")


def test_shared_memory_in_place_of_its_range(cache):
    cache.memory = cache.shared
    refused(lambda: PrefillClient("/run/a.sock", cache), "SharedMemory object", ".range()")


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 3}, "rank=3: must be a Rank, such as Rank(tp=3, tp_size=4)"),
        ({"rank": None}, "rank=None: must be a Rank"),
        ({"instance": 5}, "instance=5: must be the name"),
        ({"instance": "\ud800"}, "instance='\\ud800': must be the name"),
        ({"relayout": []}, "relayout=[]: must be 'allow', 'never' or None"),
        ({"relayout": True}, "relayout=True: must be"),
        ({"ignore_parts": "zz"}, "ignore_parts='zz': must be a list of names of parts"),
        ({"ignore_parts": [5]}, "ignore_parts=[5]: must be a list"),
        ({"ignore_parts": None}, "ignore_parts=None: must be a list"),
        ({"timeout_s": "x"}, "timeout_s='x': must be a positive number of seconds"),
    ],
)
def test_options(kind, options, text, cache):
    refused(lambda: kind("/run/a.sock", cache, **options), text)


def test_a_part_of_the_other_side_may_be_ignored(prefill_agent, cache):
    with PrefillClient(prefill_agent.socket_path, cache, ignore_parts={"draft.k"}):
        assert prefill_agent.next(AttachWorker).ignore_parts == ["draft.k"]


def test_nothing_reaches_the_agent(prefill_agent, cache):
    refused(lambda: PrefillClient(prefill_agent.socket_path, cache, rank=3), "rank=3")
    PrefillClient(prefill_agent.socket_path, cache).close()
    prefill_agent.next(WorkerHello)
    assert prefill_agent._received[WorkerHello].empty()


SENDS = [
    ({"aux": "x"}, "aux='x': must be bytes, such as aux=text.encode()"),
    ({"aux": 5}, "aux=5: must be bytes"),
    ({"aux": None}, "aux=None: must be bytes"),
    ({"layers": 5}, "layers=5: must be global layer ids"),
    ({"layers": "x"}, "layers='x': must be global layer ids"),
    ({"layers": [0.5]}, "layers=[0.5]: must be global layer ids"),
    ({"tokens": "x"}, "tokens='x': must be an integer of at least 0"),
    ({"tokens": 1 << 70}, "must be an integer of at least 0, below 2**62"),
    ({"last": "no"}, "last='no': must be True or False"),
    ({"last": None}, "last=None: must be True or False"),
]


@pytest.mark.parametrize(("options", "text"), SENDS)
def test_send(prefill_agent, prefill, options, text):
    refused(lambda: prefill.send(7, [1], **options), text)
    sending = prefill.open(7)
    assert prefill_agent.next(OpenSend).room == 7
    refused(lambda: sending.send([1], **options), text)
    sending.send([1], aux=bytearray(b"x"))


@pytest.mark.parametrize(("options", "text"), SENDS)
async def test_send_on_a_loop(async_prefill, options, text):
    with pytest.raises(ConfigError) as raised:
        await async_prefill.send(7, [1], **options)
    assert text in str(raised.value)


def test_aux_may_be_a_view_and_is_measured_in_bytes(prefill_agent, prefill):
    prefill.send(7, [1], aux=memoryview(np.arange(3, dtype=np.uint32)))
    assert len(prefill_agent.next(OpenSend).chunk.aux) == 12
    wide = memoryview(np.zeros(1 << 14, np.uint64))
    refused(lambda: prefill.send(8, [1], aux=wide), "aux has 131072 bytes, at most 65536")


def test_what_a_chunk_waits_for(prefill):
    refused(lambda: prefill.open(7).send([1], after=5), "after=5: must have a method synchronize()")


async def test_what_a_chunk_waits_for_on_a_loop(async_prefill):
    sending = await async_prefill.open(7)
    with pytest.raises(ConfigError, match=r"after=5: must have a method query\(\)"):
        await sending.send([1], after=5)


@pytest.mark.parametrize("prefill", [None, 5, "", [], [None], [PREFILL, ""], b"tcp://x"])
def test_addresses(decode_agent, decode, prefill):
    for call in (
        lambda: decode.connect(prefill),
        lambda: decode.receive(7, prefill, [1]),
    ):
        refused(call, "prefill=", "must be an address of a prefill agent", "`addresses`")
    assert decode_agent._received[OpenReceive].empty()


@pytest.mark.parametrize("prefix_tokens", [None, "x", 0.0, -1, True])
def test_prefix_tokens(decode, prefix_tokens):
    text = f"prefix_tokens={prefix_tokens!r}: must be an integer of at least 0"
    refused(lambda: decode.receive(7, PREFILL, [1], prefix_tokens=prefix_tokens), text)


@pytest.mark.parametrize("timeout_s", [None, "x", float("nan"), float("inf"), True])
def test_waiting(prefill, timeout_s):
    refused(lambda: prefill.open(7).wait(timeout_s), f"timeout_s={timeout_s!r}: must be a number")


@pytest.mark.parametrize("until", ["COMMITTED", [], None, 7, 8])
def test_states_that_nobody_can_wait_for(prefill, until):
    refused(lambda: prefill.open(7).wait(1, until=until), f"until={until!r}: a transfer can be")


@pytest.mark.parametrize("pages", [None, "ab", {1, 2}, [1.5], [[1]]])
def test_pages(prefill, pages):
    refused(lambda: prefill.send(7, pages), f"page ids {pages!r} have dtype", "array of integers")


@pytest.mark.parametrize("timeout_s", [0, -1])
def test_waiting_not_at_all(prefill, timeout_s):
    with pytest.raises(TimeoutError, match="it goes on"):
        prefill.open(7).wait(timeout_s)


async def test_waiting_on_a_loop(async_prefill):
    sending = await async_prefill.open(7)
    with pytest.raises(ConfigError, match="timeout_s='x': must be a number"):
        await sending.wait("x")


def test_reason(prefill):
    refused(lambda: prefill.open(7).abort(5), "reason=5: must be a text")


def test_nobody_there_names_the_remedy(tmp_path, cache):
    path = tmp_path / "none.sock"
    remedy = (
        f"no agent at socket_path={path}: No such file or directory. Start pdxfer-prefill or "
        "pdxfer-decode, or give the client the socket path of the one that runs: its setting "
        "socket_path, `socket` in its ready file"
    )
    with pytest.raises(DaemonUnavailableError) as raised:
        DecodeClient(path, cache)
    assert str(raised.value) == remedy
    with pytest.raises(DaemonUnavailableError) as raised:
        asyncio.run(AsyncDecodeClient.create(path, cache))
    assert str(raised.value) == remedy


@pytest.mark.parametrize("start", [embedded.prefill_agent, embedded.decode_agent])
def test_configuration_of_an_embedded_agent(start):
    role = start.__name__.removesuffix("_agent")
    refused(lambda: start(5), "config=5: must be an AgentConfig", f"role='{role}'")
    other = {"prefill": "decode", "decode": "prefill"}[role]
    config = embedded.AgentConfig(role=other, socket_path="")
    refused(lambda: start(config), f"role='{other}'", f"with role='{role}'")


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("socket_path", 5, "a text"),
        ("bind", None, "a text"),
        ("lanes", "tcp", "a tuple of names"),
        ("allowed_uids", 5, "a tuple of numbers"),
        ("allowed_uids", ("me",), "a tuple of numbers"),
        ("drain_deadline_s", "x", "a number of seconds, 0 or more"),
        ("drain_deadline_s", -1.0, "a number of seconds, 0 or more"),
        ("insecure", "no", "True or False"),
    ],
)
def test_settings_of_an_embedded_agent(setting, value, wanted):
    config = dataclasses.replace(
        embedded.AgentConfig(role="decode", socket_path=""), **{setting: value}
    )
    refused(lambda: embedded.decode_agent(config), f"{setting}={value!r}: must be {wanted}")


def test_numbers_of_numpy_are_numbers(prefill_agent, prefill, decode_agent, decode):
    prefill.send(np.uint64(7), [1], tokens=np.int64(3), layers=np.arange(2))
    message = prefill_agent.next(OpenSend)
    assert (message.room, message.chunk.tokens, message.chunk.layers) == (7, 3, [0, 1])
    decode.receive(np.int32(7), PREFILL, [1], tokens=np.int64(3), prefix_tokens=np.int64(1))
    received = decode_agent.next(OpenReceive)
    assert (received.room, received.place.tokens, received.place.prefix_tokens) == (7, 3, 1)


def test_memory_is_checked_against_the_layout_by_number(cache):
    cache.memory = [*cache.memory, dataclasses.replace(cache.memory[0])]
    refused(lambda: PrefillClient("/run/a.sock", cache), "2 ranges, its layout 1 regions")


def test_long_values_are_cut(cache):
    with pytest.raises(ConfigError) as raised:
        PrefillClient("/run/a.sock", cache, instance=list(range(10_000)))
    assert len(str(raised.value)) < 250
    assert "... (list)" in str(raised.value)


def test_caches_may_keep_their_memory_in_any_sequence(prefill_agent):
    made = SmallCache()
    made.memory = list(made.memory)
    PrefillClient(prefill_agent.socket_path, made, rank=Rank()).close()
    made.shared.close()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_too_long_to_be_shown_is_a_typed_error_too(prefill, sign):
    with pytest.raises(ConfigError, match="tokens=a value of type int too long to be shown"):
        prefill.send(1, [1], tokens=sign * 10**5000)
