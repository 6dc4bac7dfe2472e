"""Page lists as engines have them: one page too many, none at all, a single id; at the call."""

import numpy as np
import pytest

from pdxfer.client import DecodeClient, Pages, PrefillClient, Rank
from pdxfer.errors import ConfigError
from pdxfer.layout import StateTensor, combine, page_major, state
from pdxfer.local.messages import OpenReceive, OpenSend, PlacePages, SendChunk
from pdxfer.protocol.group_pages import unpack_group
from pdxfer.wire.pages import unpack_ids
from tests.support.fake_agent import FakeAgent
from tests.unit.client.conftest import SmallCache

PREFILL = "prefill:7100/"
ONE = {"layers": [0], "kv_heads": 1, "head_dim": 8, "page_size": 4, "dtype": "bfloat16"}


def ids_of(groups, name="full"):
    return unpack_ids(groups[name].encoding, groups[name].ids).tolist()


@pytest.fixture
def two_groups():
    made = SmallCache(combine(page_major(**ONE, pages=16), page_major(**ONE, pages=8, group="swa")))
    yield made
    made.shared.close()


@pytest.fixture
def hybrid():
    rows = state(layers=[1], tensors=[StateTensor("temporal", (2, 4), "float32", axis=0)], slots=8)
    made = SmallCache(combine(page_major(**ONE, pages=16), rows))
    yield made
    made.shared.close()


def test_trim_leaves_out_one_page_behind_the_last_token(prefill_agent, prefill):
    prefill.send(1, [4, 2, 9], tokens=8, trim=True)
    assert ids_of(prefill_agent.next(OpenSend).chunk.groups) == [4, 2]
    sending = prefill.open(2)
    sending.send([1, 2], last=False, trim=True)
    sending.send([3, 4], tokens=12, trim=True)
    chunks = [prefill_agent.next(SendChunk).chunk for _ in range(2)]
    assert [ids_of(chunk.groups) for chunk in chunks] == [[1, 2], [3]]


def test_trim_leaves_alone_what_fits(prefill_agent, prefill, decode_agent, decode):
    prefill.send(1, [4, 2], tokens=5, trim=True)
    assert ids_of(prefill_agent.next(OpenSend).chunk.groups) == [4, 2]
    decode.receive(1, PREFILL, [4, 2], tokens=5, trim=True)
    assert ids_of(decode_agent.next(OpenReceive).place.groups) == [4, 2]


def test_trim_of_places(decode_agent, decode):
    decode.receive(1, PREFILL, [4, 2, 9], tokens=11, prefix_tokens=5, trim=True)
    assert ids_of(decode_agent.next(OpenReceive).place.groups) == [4, 2]
    decode.receive(2, PREFILL).place([5, 6], tokens=4, trim=True)
    assert ids_of(decode_agent.next(PlacePages).place.groups) == [5]


def test_each_group_is_trimmed_by_itself(tmp_path, two_groups):
    with (
        FakeAgent(tmp_path / "agent.sock", "decode") as agent,
        DecodeClient(agent.socket_path, two_groups) as client,
    ):
        pages = {"full": [1, 2, 3, 4], "swa": Pages([5], 8)}
        client.receive(1, PREFILL, pages, tokens=12, trim=True)
        groups = agent.next(OpenReceive).place.groups
        assert (ids_of(groups), ids_of(groups, "swa")) == ([1, 2, 3], [5])


@pytest.mark.parametrize("trim", [False, True])
def test_a_list_that_is_too_long_is_refused_at_the_call(
    prefill_agent, prefill, decode_agent, decode, trim
):
    text = "4 pages of 4 tokens from token 0 on end at token 16.*tokens=7: leave the last 2 out"
    with pytest.raises(ConfigError, match=text):
        prefill.send(1, [1, 2, 3, 4], tokens=7, trim=trim)
    with pytest.raises(ConfigError, match=text):
        decode.receive(1, PREFILL, [1, 2, 3, 4], tokens=7, trim=trim)
    sending, receiving = prefill.open(2), decode.receive(2, PREFILL)
    with pytest.raises(ConfigError, match=text):
        sending.send([1, 2, 3, 4], tokens=7, trim=trim)
    with pytest.raises(ConfigError, match=text):
        receiving.place([1, 2, 3, 4], tokens=7, trim=trim)
    sending.send([1, 2], tokens=7)
    receiving.place([1, 2], tokens=7)
    assert prefill_agent.next(OpenSend).room == 2
    assert decode_agent.next(OpenReceive).room == 2


def test_a_list_that_is_too_short_is_refused_at_the_call(prefill_agent, prefill):
    with pytest.raises(ConfigError, match=r"2 pages .* end at token 8.*tokens=9: give the missing"):
        prefill.send(1, [1, 2], tokens=9)
    sending = prefill.open(2)
    sending.send([1], last=False)
    with pytest.raises(ConfigError, match=r"1 pages .* from token 4 on end at token 8"):
        sending.send([2], tokens=9)
    sending.send([2, 3], tokens=9)


def test_a_context_parallel_rank_may_hold_a_share(prefill_agent, cache):
    rank = Rank(cp=1, cp_size=2)
    with PrefillClient(prefill_agent.socket_path, cache, rank=rank) as client:
        client.send(1, [1], tokens=9)
        client.open(2).send([1], tokens=9)


def test_chunks_that_do_not_follow_each_other_are_refused_at_the_call(prefill_agent, prefill):
    sending = prefill.open(1)
    sending.send([1, 2], tokens=16, last=False)
    with pytest.raises(ConfigError, match=r"first_token=4 .* end at token 8; pages are sent once"):
        sending.send(Pages([3], 4), last=False)
    with pytest.raises(ConfigError, match="tokens=12 after tokens=16"):
        sending.send([3, 4], tokens=12)
    sending.send([3, 4])
    chunks = [prefill_agent.next(SendChunk).chunk for _ in range(2)]
    assert [ids_of(chunk.groups) for chunk in chunks] == [[1, 2], [3, 4]]


def test_what_was_refused_counts_for_nothing(prefill_agent, prefill):
    sending = prefill.open(1)
    with pytest.raises(ConfigError):
        sending.send([1, 2, 3], tokens=4)
    sending.send([1, 2, 3], tokens=12)
    assert prefill_agent.next(SendChunk).chunk.tokens == 12


@pytest.mark.parametrize("pages", [[], np.zeros(0, np.int32), {"full": []}, {}])
def test_a_request_without_tokens_has_empty_lists(
    prefill_agent, prefill, decode_agent, decode, pages
):
    prefill.send(1, pages, tokens=0, aux=b"aux")
    chunk = prefill_agent.next(OpenSend).chunk
    assert (chunk.tokens, chunk.aux) == (0, b"aux")
    decode.receive(1, PREFILL, pages, tokens=0)
    place = decode_agent.next(OpenReceive).place
    assert (place.tokens, ids_of(place.groups)) == (0, [])


def test_a_request_without_tokens_moves_nothing(prefill, decode, tmp_path, hybrid):
    with pytest.raises(ConfigError, match="leave the last 1 out"):
        prefill.send(1, [1], tokens=0)
    with pytest.raises(ConfigError, match="leave the last 1 out"):
        decode.receive(1, PREFILL, [1], tokens=0)
    with pytest.raises(ConfigError, match=r"tokens=None: .*tokens=0|tokens=0: .*tokens=0"):
        decode.receive(1, PREFILL, [])
    with FakeAgent(tmp_path / "p", "prefill") as agent:
        with (
            PrefillClient(agent.socket_path, hybrid) as client,
            pytest.raises(ConfigError, match=r"state group state.*tokens=0 moves nothing"),
        ):
            client.send(1, {"full": [], "state": [1]}, tokens=0)
    with FakeAgent(tmp_path / "d", "decode") as agent:
        with (
            DecodeClient(agent.socket_path, hybrid) as client,
            pytest.raises(ConfigError, match=r"state group state.*tokens=0 moves nothing"),
        ):
            client.receive(1, PREFILL, {"full": [], "state": [1]}, tokens=0)


def test_a_missing_group_is_refused_at_the_call(tmp_path, two_groups):
    with (
        FakeAgent(tmp_path / "agent.sock", "decode") as agent,
        DecodeClient(agent.socket_path, two_groups) as client,
    ):
        with pytest.raises(ConfigError, match="no pages of group swa"):
            client.receive(1, PREFILL, {"full": [1]}, tokens=4)
        assert agent.count(OpenReceive) == 0


@pytest.mark.parametrize("one", [3, np.int64(3), np.array(3)])
def test_a_single_id_is_a_list_of_one(prefill_agent, prefill, decode_agent, decode, one):
    prefill.send(1, one, tokens=3)
    assert ids_of(prefill_agent.next(OpenSend).chunk.groups) == [3]
    decode.receive(1, PREFILL, {"full": one}, tokens=3)
    assert ids_of(decode_agent.next(OpenReceive).place.groups) == [3]


@pytest.mark.parametrize("trim", [1, None, "yes"])
def test_trim_is_a_flag(prefill, decode, trim):
    with pytest.raises(ConfigError, match="trim="):
        prefill.send(1, [1], tokens=1, trim=trim)
    with pytest.raises(ConfigError, match="trim="):
        decode.receive(1, PREFILL, [1], tokens=1, trim=trim)


def test_trim_goes_with_the_pages(decode):
    with pytest.raises(ConfigError, match="trim go with the pages"):
        decode.receive(1, PREFILL, trim=True)


def test_a_null_page_is_skipped_and_its_tokens_are_counted(
    prefill_agent, prefill, decode_agent, decode
):
    prefill.send(1, [0, 0, 4, 0, 2], tokens=18, null_page=0)
    group = unpack_group(prefill_agent.next(OpenSend).chunk.groups["full"])
    assert (group.ids.tolist(), group.first_token) == ([4, 2], 0)
    assert group.skipped == ((0, 8), (12, 16))
    decode.receive(1, PREFILL, [-1, 3, 5], tokens=14, prefix_tokens=5, null_page=-1)
    group = unpack_group(decode_agent.next(OpenReceive).place.groups["full"])
    assert (group.ids.tolist(), group.first_token, group.skipped) == ([3, 5], 4, ((4, 8),))
    decode.receive(2, PREFILL).place([16, 16], null_page=16)
    place = decode_agent.next(PlacePages).place
    assert (place.tokens, unpack_group(place.groups["full"]).skipped) == (8, ((0, 8),))


def test_null_pages_of_chunks_are_counted_from_where_the_last_one_ended(prefill_agent, prefill):
    sending = prefill.open(1)
    sending.send([1, 0], last=False, null_page=0)
    sending.send([0, 2, 0], tokens=16, null_page=0, trim=True)
    groups = [unpack_group(prefill_agent.next(SendChunk).chunk.groups["full"]) for _ in range(2)]
    assert [(each.first_token, each.skipped) for each in groups] == [
        (0, ((4, 8),)),
        (8, ((8, 12),)),
    ]
    assert [each.ids.tolist() for each in groups] == [[1], [2]]


def test_a_null_page_that_is_one_too_many_is_trimmed(decode_agent, decode):
    decode.receive(1, PREFILL, [1, 0, 0], tokens=8, null_page=0, trim=True)
    group = unpack_group(decode_agent.next(OpenReceive).place.groups["full"])
    assert (group.ids.tolist(), group.skipped) == ([1], ((4, 8),))
    with pytest.raises(ConfigError, match=r"3 pages of 4 tokens .*leave the last 1 out"):
        decode.receive(2, PREFILL, [1, 0, 0], tokens=8, null_page=0)


@pytest.mark.parametrize("null", [1, 15])
def test_an_id_that_a_page_has_cannot_stand_for_none(prefill, decode, null):
    text = f"null_page={null} is a page of group full, whose ids are 1 <= id < 16"
    with pytest.raises(ConfigError, match=text):
        prefill.send(1, [2], tokens=4, null_page=null)
    with pytest.raises(ConfigError, match=text):
        decode.receive(1, PREFILL, [2], tokens=4, null_page=null)


@pytest.mark.parametrize("null", ["0", 0.0, True, 1 << 70])
def test_a_null_page_is_an_integer(prefill, null):
    with pytest.raises(ConfigError, match="null_page="):
        prefill.send(1, [2], tokens=4, null_page=null)


def test_what_is_no_page_is_refused_without_a_null_page(prefill):
    with pytest.raises(ConfigError, match="page id 0 of group full at position 1"):
        prefill.send(1, [2, 0], tokens=8)


def test_states_have_no_null_page(tmp_path, hybrid):
    with (
        FakeAgent(tmp_path / "p", "prefill") as agent,
        PrefillClient(agent.socket_path, hybrid) as client,
        pytest.raises(ConfigError, match="page id 0 of group state"),
    ):
        client.send(1, {"full": [0], "state": [0]}, tokens=4, null_page=0)
