"""Arrays move to huge pages where they are: same values, same addresses; only whole huge pages of theirs are asked
for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runner import huge_pages
from jaxserve.runner.huge_pages import HUGE_PAGE, move_to_huge_pages, start_on_huge_pages

ALLOWED = "always [madvise] never\n"


@pytest.fixture
def setting(tmp_path):
    def write(text):
        path = tmp_path / "enabled"
        path.write_text(text)
        return path

    return write


def test_values_and_addresses_stay(setting):
    values = np.random.default_rng(0).integers(0, 1 << 30, (3, 2 * HUGE_PAGE // 4), np.int32)
    arrays = [jax.jit(jnp.copy)(row) for row in values]
    small = jnp.arange(10)
    addresses = [array.unsafe_buffer_pointer() for array in arrays]
    moved = move_to_huge_pages([*arrays, small], setting(ALLOWED))
    assert moved % HUGE_PAGE == 0
    if huge_pages.SETTING.exists():  # Linux with huge pages: 4 MiB hold at least one that is whole
        assert moved >= len(arrays) * HUGE_PAGE
    assert [array.unsafe_buffer_pointer() for array in arrays] == addresses
    for array, row in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(array, row)
    np.testing.assert_array_equal(small, np.arange(10))


def test_zeros_are_taken_anew_and_what_lies_between_stays(setting):
    """Neighbours in memory: what is no zero array, and malloc's own words, must survive."""
    make = jax.jit(lambda: tuple(jnp.full(HUGE_PAGE // 2 + 1000, fill, jnp.float32) for fill in (0, 1, 0, 2, 0)))
    arrays = jax.block_until_ready(make())
    zeros, weights = arrays[::2], arrays[1::2]
    addresses = [array.unsafe_buffer_pointer() for array in arrays]
    thread = start_on_huge_pages(weights, zeros, setting(ALLOWED))
    assert thread is not None
    used = jax.jit(lambda x: x + 3, donate_argnums=0)(zeros[0])  # before the thread is through
    thread.join()
    assert [array.unsafe_buffer_pointer() for array in (*weights, *zeros[1:])] == addresses[1::2] + addresses[2::2]
    for array, fill in zip((used, *weights, *zeros[1:]), (3, 1, 2, 0, 0), strict=True):
        np.testing.assert_array_equal(array, np.full(array.shape, fill, np.float32))


@pytest.mark.parametrize("text", ["always madvise [never]\n", None])
def test_nothing_moves_where_the_system_has_none(setting, tmp_path, text):
    path = tmp_path / "missing" if text is None else setting(text)
    array = jnp.zeros(HUGE_PAGE, jnp.float32)
    assert move_to_huge_pages([array], path) == 0
    assert start_on_huge_pages([array], [array], path) is None


def test_every_shard_is_found():
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), devices=devices)
    array = jax.device_put(jnp.arange(64.0), jax.NamedSharding(mesh, jax.P("x")))
    found = huge_pages._ranges([array, array])
    assert [end - start for start, end in found] == [128, 128]
    assert {start for start, _ in found} == {s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, HUGE_PAGE - 1)], []),
        ([(1, 3 * HUGE_PAGE)], [(HUGE_PAGE, 3 * HUGE_PAGE)]),
        ([(0, 2 * HUGE_PAGE + 5)], [(0, 2 * HUGE_PAGE)]),
        # Neighbours with a header of malloc in between share the page in their middle; far ones do not.
        ([(0, HUGE_PAGE // 2), (HUGE_PAGE // 2 + 64, HUGE_PAGE)], [(0, HUGE_PAGE)]),
        ([(0, HUGE_PAGE // 4), (HUGE_PAGE // 2, HUGE_PAGE)], []),
        # One that lies within another.
        ([(0, 2 * HUGE_PAGE), (100, 200)], [(0, 2 * HUGE_PAGE)]),
    ],
)
def test_only_whole_huge_pages(ranges, expected):
    assert huge_pages._whole_huge_pages(ranges) == expected
