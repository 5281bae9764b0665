"""The fixed-size cache: rows of different lengths, rollback, the mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv


@pytest.mark.parametrize(("asked", "given"), [(1, 128), (128, 128), (129, 256), (500, 512)])
def test_capacity_is_rounded_up_to_whole_chunks(asked, given):
    assert kv.round_up(asked) == given
    cache = kv.init(2, asked, num_layers=2, num_kv_heads=3, head_dim=4, dtype=jnp.float32)
    assert [k.shape for k in cache.k] == [(2, 3, given, 4)] * 2
    assert cache.length.tolist() == [0, 0]


def test_no_two_buffers_are_shared():
    """A donated buffer that stands for two would be freed under the other."""
    cache = kv.init(1, 1, num_layers=2, num_kv_heads=1, head_dim=1, dtype=jnp.float32)
    pointers = {buffer.unsafe_buffer_pointer() for buffer in (*cache.k, *cache.v)}
    assert len(pointers) == 4


@pytest.mark.parametrize("starts", [[5], [0, 3, 6]])
def test_write_touches_each_rows_own_places_only(starts):
    batch = len(starts)
    buffer = jnp.arange(batch * 2 * 9 * 3, dtype=jnp.float32).reshape(batch, 2, 9, 3)
    new = -1 - jnp.arange(batch * 2 * 3 * 3, dtype=jnp.float32).reshape(batch, 2, 3, 3)
    written = kv.write(buffer, new, jnp.asarray(starts, jnp.int32))
    expected = np.array(buffer)
    for row, start in enumerate(starts):
        expected[row, :, start : start + 3] = new[row]
    np.testing.assert_array_equal(written, expected)


def test_write_keeps_the_buffers_dtype():
    buffer = jnp.zeros((2, 1, 4, 1), jnp.bfloat16)
    assert kv.write(buffer, jnp.ones((2, 1, 1, 1), jnp.float32), jnp.zeros(2, jnp.int32)).dtype == jnp.bfloat16


def test_rollback_moves_a_length_and_nothing_else():
    cache = kv.init(2, 4, num_layers=1, num_kv_heads=1, head_dim=1, dtype=jnp.float32)
    cache = jax.tree.map(jnp.ones_like, cache)
    rolled = kv.rollback(cache, jnp.asarray([3, 1], jnp.int32))
    assert rolled.length.tolist() == [3, 1]
    assert rolled.k[0] is cache.k[0]
    assert rolled.v[0] is cache.v[0]


@pytest.mark.parametrize("first", [0, 2, 128])
def test_a_token_sees_itself_and_all_before_it(first):
    start = jnp.asarray([0, 3, 130], jnp.int32)
    seen = kv.visible(start, 2, first, 5)
    for row, begin in enumerate(start.tolist()):
        for t in range(2):
            assert seen[row, t].tolist() == [first + c <= begin + t for c in range(5)]
