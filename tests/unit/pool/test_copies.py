"""Host copies: their form, what is refused, and that a refusal writes nothing."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.pool import PageMajorPool, ShapeError, SlotError, TokenMajorPool  # noqa: E402
from tests.support.pools import FAMILIES, FP8, MLA, SHAPE, assert_memory, fill, snapshot  # noqa: E402

KINDS = [TokenMajorPool, PageMajorPool]


def token(**options):
    return {**SHAPE, **options}


def test_form_of_a_copy(make):
    pool = make(PageMajorPool, **token(**FP8))
    loc = torch.arange(4, 24)
    copied = pool.get_cpu_copy(loc)
    assert len(copied) == 3
    assert [len(chunks) for chunks in copied] == [1, 1, 1]
    keys, values = copied[0][0]
    assert (keys.shape, values.shape) == ((20, 2, 16), (20, 2, 16))
    assert keys.dtype == values.dtype == torch.uint8
    assert keys.device.type == "cpu"
    assert not keys.is_pinned()


def test_a_copy_is_in_chunks_of_8192_rows(make):
    pool = make(TokenMajorPool, **token(layer_num=1, page_size=1))
    assert pool.cpu_offloading_chunk_size == 8192
    loc = torch.arange(8192 * 2 + 3) % 24 + 1
    copied = pool.get_cpu_copy(loc)
    assert [len(keys) for keys, _ in copied[0]] == [8192, 8192, 3]
    pool.load_cpu_copy(copied, loc)


def test_no_indices_are_a_copy_of_no_chunks(make):
    pool = make(PageMajorPool, **SHAPE)
    empty = torch.zeros(0, dtype=torch.int64)
    copied = pool.get_cpu_copy(empty)
    assert copied == [[], [], []]
    pool.load_cpu_copy(copied, empty)


def test_a_latent_copy_is_one_tensor_a_chunk(make):
    pool = make(FAMILIES["mla"]["page_major"])
    assert pool.get_cpu_copy(torch.tensor([9, 4]))[2][0].shape == (2, 1, 24)
    assert MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"] == 24


def test_draft_lanes_are_layers_after_the_targets(make):
    pool = make(FAMILIES["draft"]["unified"])
    assert pool.draft_layer_ids == (40, 41)
    rows = torch.ones(1, 1, 8)
    pool.set_kv_buffer(41, torch.tensor([7]), rows, 2 * rows)
    copied = pool.get_cpu_copy(torch.tensor([7]))
    assert len(copied) == 5
    assert copied[4][0][0].sum() == 8
    assert copied[4][0][1].sum() == 16
    assert copied[3][0][0].sum() == copied[2][0][0].sum() == 0
    assert len(pool.k_buffer) == 3
    assert pool.get_key_buffer(41).shape == (28, 1, 8)


def test_the_last_row_of_a_repeated_slot_stays(make):
    pool = make(TokenMajorPool, **SHAPE)
    rows = torch.arange(3)[:, None, None].expand(3, 2, 8).to(torch.bfloat16)
    values = torch.arange(3)[:, None, None].expand(3, 2, 16).to(torch.bfloat16)
    copied = [[[rows, values]]] * 3
    pool.load_cpu_copy(copied, torch.tensor([6, 9, 6]))
    assert pool.get_key_buffer(5)[6].unique().tolist() == [2]
    assert pool.get_value_buffer(5)[9].unique().tolist() == [1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer_num": 2}, "the copy has 2 layers, the pool 3"),
        ({"head_dim": 16}, r"k of layer 5 of the copy has torch.bfloat16 \(2, 2, 16\)"),
        ({"v_head_dim": 8}, r"v of layer 5 of the copy has torch.bfloat16 \(2, 2, 8\)"),
        ({"head_num": 1}, r"\(2, 1, 8\), the pool torch.bfloat16 \(2, 2, 8\)"),
        ({"dtype": torch.float16}, "the copy is of float16 elements, the pool of bfloat16"),
        ({"dtype": torch.float8_e5m2}, "the copy is of float8_e5m2 elements"),
    ],
)
def test_a_copy_of_another_geometry_is_refused_and_writes_nothing(make, kind, options, text):
    source = make(TokenMajorPool, **token(**options))
    pool = make(kind, **SHAPE)
    fill(pool)
    before = snapshot(pool)
    copied = source.get_cpu_copy(torch.tensor([4, 5]))
    with pytest.raises(ShapeError, match=text):
        pool.load_cpu_copy(copied, torch.tensor([4, 5]))
    assert_memory(pool, before)


def test_a_plain_list_of_other_bytes_is_refused(make):
    pool = make(TokenMajorPool, **SHAPE)
    rows = torch.zeros(1, 2, 8, dtype=torch.float16)
    with pytest.raises(ShapeError, match=r"k of layer 5 of the copy has torch\.float16"):
        pool.load_cpu_copy([[[rows, rows]]] * 3, torch.tensor([4]))
    good = torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="has 1 tensors, the pool 2: k, v"):
        pool.load_cpu_copy([[[good]]] * 3, torch.tensor([4]))


def test_what_is_wrong_in_the_last_layer_is_found_before_the_first_is_written(make):
    pool = make(PageMajorPool, **SHAPE)
    fill(pool)
    before = snapshot(pool)
    copied = pool.get_cpu_copy(torch.tensor([4, 5]))
    copied[2][0][1] = copied[2][0][1][:1]
    with pytest.raises(ShapeError, match=r"v of layer 7 .* \(1, 2, 16\)"):
        pool.load_cpu_copy(copied, torch.tensor([8, 9]))
    assert_memory(pool, before)


def test_a_copy_needs_as_many_indices_as_rows(make):
    pool = make(TokenMajorPool, **SHAPE)
    copied = pool.get_cpu_copy(torch.tensor([4, 5]))
    with pytest.raises(ShapeError, match="layer 5 of the copy has 2 rows for 3 indices"):
        pool.load_cpu_copy(copied, torch.tensor([4, 5, 6]))


@pytest.mark.parametrize(
    ("indices", "error", "text"),
    [
        ([-1], SlotError, "indices has slot -1; the pool has 0 <= slot < 28"),
        ([4, 28], SlotError, "indices has slot 28"),
        ([2**40], SlotError, "indices has slot 1099511627776"),
        ([[4]], ShapeError, "one-dimensional slot ids"),
        ([4.0], ShapeError, "one-dimensional slot ids"),
    ],
)
def test_indices_that_are_no_slots_are_refused(make, indices, error, text):
    pool = make(PageMajorPool, **SHAPE)
    copied = pool.get_cpu_copy(torch.tensor([4]))
    for call in (
        lambda: pool.get_cpu_copy(torch.tensor(indices)),
        lambda: pool.load_cpu_copy(copied, torch.tensor(indices)),
    ):
        with pytest.raises(error, match=text) as raised:
            call()
        assert isinstance(raised.value, ConfigError)


class TestMoves:
    def test_a_row_moves_onto_a_row_that_moves(self, make):
        pool = make(PageMajorPool, **SHAPE)
        rows = torch.arange(3, dtype=torch.bfloat16)[:, None, None]
        loc = torch.tensor([4, 5, 6])
        pool.set_kv_buffer(6, loc, rows.expand(3, 2, 8), rows.expand(3, 2, 16))
        pool.move_kv_cache(torch.tensor([5, 6, 7]), loc)
        moved = pool.get_key_buffer(6).reshape(28, 2, 8)
        assert moved[4:8, 0, 0].tolist() == [0, 0, 1, 2]

    def test_other_counts_and_ids_are_refused(self, make):
        pool = make(PageMajorPool, **SHAPE)
        ids = torch.tensor([4, 5])
        with pytest.raises(ShapeError, match="2 targets for 1 sources"):
            pool.move_kv_cache(ids, ids[:1])
        with pytest.raises(SlotError, match="src_loc has slot 28"):
            pool.move_kv_cache(ids, torch.tensor([4, 28]))
        with pytest.raises(SlotError, match="tgt_pages has slot 7"):
            pool.move_pages(torch.tensor([7]), torch.tensor([1]))
