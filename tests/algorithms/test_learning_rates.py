"""Where learning rates come from: numbers, schedules, factories and ready transformations."""

import jax
import numpy as np
import optax
import pytest
from helpers.problems import squared

import jfl

GRAD = jfl.grad(squared)


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda **o: jfl.algorithms.fedavg(GRAD, optimizer=optax.adam(0.01), **o), "lr"),
        (
            lambda **o: jfl.algorithms.fedavg(GRAD, server_optimizer=optax.adam(0.01), **o),
            "server_lr",
        ),
        (lambda **o: jfl.algorithms.fedsgd(GRAD, server_optimizer=optax.adam(0.01), **o), "lr"),
        (lambda **o: jfl.algorithms.fedprox(GRAD, mu=0.1, optimizer=optax.adam(0.01), **o), "lr"),
    ],
)
@pytest.mark.parametrize("rate", [5.0, lambda clock: 0.1])
def test_a_rate_beside_a_ready_transformation_is_refused(make, name, rate):
    with pytest.raises(
        ValueError, match=f"either a learning rate or an optax transformation.*Leave {name} out"
    ):
        make(**{name: rate})
    make()


def test_control_variates_read_the_rate_of_a_ready_transformation():
    jfl.algorithms.scaffold(GRAD, optimizer=optax.sgd(0.5), lr=0.5)


@pytest.mark.parametrize("every", [1, 3])
def test_a_ready_schedule_is_taken_as_it_is(every):
    ready = optax.exponential_decay(0.1, 10, 0.5)
    given = jfl.schedules.from_optax(ready, every=every)
    by_factory = jfl.schedules.from_optax(
        optax.exponential_decay, every, init_value=0.1, transition_steps=10, decay_rate=0.5
    )
    for clock in (0, 7, 30):
        assert float(given(clock)) == pytest.approx(float(ready(clock // every)))
        assert float(given(clock)) == pytest.approx(float(by_factory(clock)))


def test_a_client_counts_local_steps_and_the_server_rounds():
    seen = {"client": [], "server": []}

    def clocked(name, factor):
        def schedule(clock):
            jax.debug.callback(lambda c: seen[name].append(int(np.max(c))), clock)
            return 0.1 * factor

        return schedule

    rows = np.ones((8, 2), np.float32)
    fed = jfl.federate(
        jfl.datasets.arrays(
            rows, np.ones(8, np.float32), rows[:2], np.ones(2, np.float32), classes=0
        ),
        jfl.partition.iid(2),
    )
    task = jfl.task(np.zeros(2, np.float32), lambda w, x, y: (x @ w - y) ** 2)
    alg = jfl.algorithms.fedavg(
        jfl.grad(task.loss),
        lr=clocked("client", 1.0),
        server_lr=clocked("server", 1.0),
        steps=3,
        batch=jfl.batches.full(),
    )
    jfl.simulate(jax.random.key(0), jfl.plan(fed, task, alg, jfl.sampling.full(2)), rounds=2)
    jax.effects_barrier()
    assert set(seen["client"]) >= {0, 1, 2, 3, 4, 5} and set(seen["server"]) == {0, 1}
