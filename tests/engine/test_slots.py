"""Which slots of a cohort each device runs, and what devices tell each other."""

import dataclasses
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from scipy import stats

import jfl
from jfl.core.records import Cohort, Fn
from jfl.engine import sharding


def plan_of(clients, scheme, cohort, chunk, devices):
    sampler = dict(
        full=lambda: jfl.sampling.full(clients),
        without_replacement=lambda: jfl.sampling.without_replacement(clients, cohort),
        with_replacement=lambda: jfl.sampling.with_replacement(clients, cohort),
        poisson=lambda: jfl.sampling.poisson(clients, cohort / clients),
    )[scheme]()
    mesh = AbstractMesh((devices,), ("clients",))
    return SimpleNamespace(sampler=sampler, chunk=chunk, mesh=mesh)  # what slots need of a plan


def taken(chunks):
    """(client, times) of the slots that hold one."""
    ids, count, turn = (np.asarray(x).ravel() for x in chunks)
    assert (turn == 0).all()
    return [(int(i), int(n)) for i, n in zip(ids, count) if n > 0]


def of_devices(function, devices):
    """What each device finds: `function` of its number."""
    found = jax.jit(jax.vmap(function))(jnp.arange(devices))
    return [jax.tree.map(lambda x, device=device: x[device], found) for device in range(devices)]


SCHEMES = ("full", "without_replacement", "with_replacement", "poisson")


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    scheme=st.sampled_from(SCHEMES),
    clients=st.integers(2, 23),
    devices=st.sampled_from([2, 3, 8]),
    chunk=st.sampled_from([None, 1, 2, 5]),
    accelerator=st.booleans(),
    data=st.data(),
)
@pytest.mark.slow
def test_every_client_of_a_cohort_runs_once_and_where_its_state_is(
    scheme, clients, devices, chunk, accelerator, data
):
    cohort = data.draw(st.integers(1, clients))
    plan = plan_of(clients, scheme, cohort, chunk, devices)
    drawn = plan.sampler.draw(jax.random.key(data.draw(st.integers(0, 99))))
    held = -(-clients // devices)
    with pytest.MonkeyPatch.context() as patch:
        if accelerator:
            patch.setattr(jax, "default_backend", lambda: "gpu")
        both = lambda device: (
            sharding.chunks_by_state(device, held, drawn, plan),
            sharding.chunks_of_device(device, drawn, plan),
        )
        parts, dealt = zip(*of_devices(both, devices))
        parts, lost = zip(*parts)
        layout = sharding.chunk_layout_by_state(plan, held)
    wanted = sorted(taken(drawn[:3]))
    assert not any(lost)
    # those that no state decides about too: each on one device
    assert sorted(sum(map(taken, parts), [])) == sorted(sum(map(taken, dealt), [])) == wanted
    for device, part in enumerate(parts):
        assert part[0].shape == layout and (chunk is None or layout[1] <= chunk)
        assert {i // held for i, _ in taken(part)} <= {device}


@pytest.mark.by_default("full", "without_replacement", "poisson")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_device_has_its_clients_first(scheme):
    """Chunks that hold nobody do not run, up to the last one that does."""
    plan = plan_of(20, scheme, 9, 2, 4)
    drawn = plan.sampler.draw(jax.random.key(3))
    for (_, count, _), _ in of_devices(
        lambda device: sharding.chunks_by_state(device, 5, drawn, plan), 4
    ):
        count = np.asarray(count).ravel() > 0
        assert (np.sort(count)[::-1] == count).all()


def test_a_uniform_cohort_needs_few_slots_of_a_device_and_what_finds_none_is_counted():
    """1,024 of 100,000 clients on 8 devices: 128 are expected on one."""
    plan = SimpleNamespace(
        sampler=jfl.sampling.without_replacement(100_000, 1024),
        chunk=None,
        mesh=AbstractMesh((8,), ("clients",)),
    )
    count, size = sharding.chunk_layout_by_state(plan, 12_500)
    assert 200 < count * size < 300
    law = stats.hypergeom(100_000, 12_500, 1024)
    assert law.sf(count * size) < 1e-18 < law.sf(180)
    ids = jnp.arange(1024, dtype=jnp.int32)  # all on the first device
    skewed = Cohort(ids, jnp.ones_like(ids), jnp.zeros_like(ids), jnp.int32(0))
    (chunks, lost), (others, none) = of_devices(
        lambda device: sharding.chunks_by_state(device, 12_500, skewed, plan), 2
    )
    assert len(taken(chunks)) == count * size and int(lost) == 1024 - count * size
    assert not taken(others) and int(none) == 0
    # no such law is known of a sampler of somebody's own
    own = jfl.sampling.with_replacement(100_000, 1024)
    plan.sampler = own
    assert np.prod(sharding.chunk_layout_by_state(plan, 12_500)) >= 1024


def test_a_sampler_in_another_order_is_not_taken_for_everyone():
    """`full` is also what a sampler of somebody's own is called if it does not say."""
    back = jnp.arange(7, dtype=jnp.int32)[::-1]
    cohort = Cohort(back, jnp.ones_like(back), jnp.zeros_like(back), jnp.int32(0))
    plan = plan_of(7, "full", 7, 2, 2)
    plan.sampler = dataclasses.replace(plan.sampler, draw=Fn(lambda key: cohort))
    parts = of_devices(lambda device: sharding.chunks_by_state(device, 4, cohort, plan)[0], 2)
    assert [sorted(i for i, _ in taken(part)) for part in parts] == [[0, 1, 2, 3], [4, 5, 6]]


COUNTS = [0, 1, 4095, 4096, 2**24 + 1, 2**27 - 1]


def test_counts_add_up_without_error_in_one_message():
    """Float32 alone cannot add 2^24 and 1."""
    counts = np.array([COUNTS, COUNTS[::-1], [3] * 6, [2**24 + 1] * 6], np.int32)
    floats = np.arange(8, dtype=np.float32).reshape(4, 2)
    tree = dict(a=jnp.asarray(floats), b=jnp.asarray(counts), c=(jnp.asarray(counts[:, 0]), ()))
    add = lambda f: jax.vmap(f, axis_name="clients", out_axes=None)
    found = add(sharding.psum_exact)(tree)
    assert np.array_equal(found["b"], counts.sum(0)) and int(found["c"][0]) == counts[:, 0].sum()
    assert found["b"].dtype == jnp.int32 and np.array_equal(found["a"], floats.sum(0))
    rounded = add(lambda x: jax.lax.psum(x.astype(jnp.float32), "clients"))(tree["b"])
    assert not np.array_equal(np.asarray(rounded, np.int64), counts.sum(0))


def test_states_are_padded_for_devices_that_they_do_not_divide():
    states = dict(a=jnp.arange(14.0).reshape(7, 2), b=jnp.arange(7))
    more = sharding.pad_rows(states, AbstractMesh((4,), ("clients",)))
    assert more["a"].shape == (8, 2) and more["b"].shape == (8,)
    assert jax.tree.all(jax.tree.map(np.array_equal, sharding.unpad_rows(more, states), states))
    even = sharding.pad_rows(states, AbstractMesh((7,), ("clients",)))
    assert jax.tree.map(jnp.shape, even) == jax.tree.map(jnp.shape, states)
    assert sharding.pad_rows(states, None) is states
