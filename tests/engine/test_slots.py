"""Which slots of a cohort each device runs, and what devices tell each other."""

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jfl
from jfl.engine import sharding, slots


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
            slots.held_by(device, held, drawn, plan),
            slots.dealt_to(device, drawn, plan),
        )
        parts, dealt = zip(*of_devices(both, devices))
        layout = slots.layout_of_holder(plan, held)
    wanted = sorted(taken(drawn[:3]))
    # those that no state decides about too: each on one device
    assert sorted(sum(map(taken, parts), [])) == sorted(sum(map(taken, dealt), [])) == wanted
    for device, part in enumerate(parts):
        assert part[0].shape == layout and (chunk is None or layout[1] <= chunk)
        assert {i // held for i, _ in taken(part)} <= {device}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_device_has_its_clients_first(scheme):
    """Chunks that hold nobody do not run, up to the last one that does."""
    plan = plan_of(20, scheme, 9, 2, 4)
    drawn = plan.sampler.draw(jax.random.key(3))
    for _, count, _ in of_devices(lambda device: slots.held_by(device, 5, drawn, plan), 4):
        count = np.asarray(count).ravel() > 0
        assert (np.sort(count)[::-1] == count).all()


COUNTS = [0, 1, 4095, 4096, 2**24 + 1, 2**27 - 1]


def test_counts_add_up_without_error_in_one_message():
    """Float32 alone cannot add 2^24 and 1."""
    counts = np.array([COUNTS, COUNTS[::-1], [3] * 6, [2**24 + 1] * 6], np.int32)
    floats = np.arange(8, dtype=np.float32).reshape(4, 2)
    tree = dict(a=jnp.asarray(floats), b=jnp.asarray(counts), c=(jnp.asarray(counts[:, 0]), ()))
    add = lambda f: jax.vmap(f, axis_name="clients", out_axes=None)
    found = add(sharding.summed)(tree)
    assert np.array_equal(found["b"], counts.sum(0)) and int(found["c"][0]) == counts[:, 0].sum()
    assert found["b"].dtype == jnp.int32 and np.array_equal(found["a"], floats.sum(0))
    rounded = add(lambda x: jax.lax.psum(x.astype(jnp.float32), "clients"))(tree["b"])
    assert not np.array_equal(np.asarray(rounded, np.int64), counts.sum(0))
    types = {v.aval.dtype for e in _sums(jax.make_jaxpr(add(sharding.summed))(tree)) for v in e}
    assert types == {jnp.dtype("float32")}


def _sums(jaxpr):
    return [
        e.invars for e in jaxpr.eqns if "reduce" in e.primitive.name or "psum" in e.primitive.name
    ]


def test_states_are_padded_for_devices_that_they_do_not_divide():
    states = dict(a=jnp.arange(14.0).reshape(7, 2), b=jnp.arange(7))
    more = sharding.padded(states, AbstractMesh((4,), ("clients",)))
    assert more["a"].shape == (8, 2) and more["b"].shape == (8,)
    assert jax.tree.all(jax.tree.map(np.array_equal, sharding.cut(more, 7), states))
    assert sharding.padded(states, AbstractMesh((7,), ("clients",))) is not None
    assert sharding.padded(states, None) is states
