"""What makes the first result come soon: compact keys, and an epsilon without a program.  How many
programs it compiles is counted in docs/test_blocks.py."""

import jax
import numpy as np
import pytest

from jfl.core.random_streams import as_kernel_key
from jfl.privacy.accountants import rdp


def draws(key):
    """Return what jax.random makes of a key, in all ways that jfl uses."""
    data = jax.random.key_data
    return (
        data(jax.random.fold_in(key, 2**32 - 1)),
        data(jax.random.split(key, (3, 2))),
        jax.random.bits(key, (5, 3)),
        jax.random.bits(key, (5,), np.uint8),
        jax.random.bits(key, (0,)),
        jax.random.normal(key, (7,)),
        jax.random.randint(key, (9,), 0, 1000),
        jax.random.permutation(key, 11),
    )


@pytest.mark.slow
def test_a_compact_key_is_the_same_key():
    """Bit for bit jax's threefry: alone, in a program, under vmap of one axis and of two."""
    key = jax.random.key(2**31 - 1)
    keys, mapped = jax.random.split(key, (2, 3)), jax.vmap(jax.vmap(draws))
    for run, plain, theirs in (
        (draws, key, draws(key)),
        (jax.jit(draws), key, draws(key)),
        (jax.jit(mapped), keys, mapped(keys)),
    ):
        for ours, wanted in zip(run(as_kernel_key(plain)), theirs, strict=True):
            np.testing.assert_array_equal(ours, wanted)


def test_a_compact_key_under_mixed_axes():
    """One key with many numbers, and many keys with one number."""
    key = jax.random.key(3)
    keys, numbers = jax.random.split(key, 4), np.arange(4)
    data, child = jax.random.key_data, jax.random.fold_in
    for axes, args in (((None, 0), (key, numbers)), ((0, None), (keys, 5))):
        ours = jax.jit(jax.vmap(child, axes))(as_kernel_key(args[0]), args[1])
        np.testing.assert_array_equal(data(ours), data(jax.vmap(child, axes)(*args)))


@pytest.mark.by_default("0", "16", "129")
@pytest.mark.parametrize("count", [0, 15, 16, 17, 128, 129, 1025])
def test_draws_around_the_lengths_of_rows(count):
    """On a CPU blocks are computed in rows of a few lengths."""
    key = jax.random.key(5)
    for draw in (jax.random.bits, lambda *of: jax.random.key_data(jax.random.split(*of))):
        np.testing.assert_array_equal(draw(as_kernel_key(key), (count,)), draw(key, (count,)))


@pytest.mark.parametrize("check_vma", [False, True])
def test_keys_of_each_device(check_vma):
    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], "clients"), jax.P("clients")
    data = jax.random.key_data(jax.random.split(jax.random.key(3), 7))

    def child_and_draws(data):
        child = jax.random.fold_in(as_kernel_key(jax.random.wrap_key_data(data)), 3)
        return jax.random.bits(child, (5,))

    draw = jax.vmap(child_and_draws)
    shared = jax.shard_map(draw, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    np.testing.assert_array_equal(jax.jit(shared)(data), draw(data))


def test_epsilon_on_the_host_is_that_of_the_program():
    rng = np.random.default_rng(0)
    mu, delta = np.exp(rng.uniform(-14, 4, 500)), 10 ** rng.uniform(-12, -0.5, 500)
    mu, delta = np.append(mu, [0, np.inf, 1, 1]), np.append(delta, [1e-5, 1e-5, 0, 1])
    found = rdp.gaussian_epsilon(mu, delta)
    with jax.enable_x64(True):
        program = jax.jit(rdp.gaussian_epsilon)(mu, delta)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, program, rtol=1e-10)
