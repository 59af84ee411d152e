"""How often a program traces the model: each trace of a real model takes seconds."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import jfl

CLIENTS, ROWS, BATCH = 6, 8, 4


class Counted(nn.Module):
    """A dense layer that counts how often it is traced."""

    traces = []

    @nn.compact
    def __call__(self, x):
        self.traces.append(x.shape)
        return nn.Dense(3)(x.reshape(-1))


def plan_of(private):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * ROWS, 5)).astype(np.float32)
    y = rng.integers(0, 3, CLIENTS * ROWS)
    fed = jfl.federate(
        jfl.datasets.arrays(x, y, x[:8], y[:8], classes=3), jfl.partition.iid(CLIENTS)
    )
    task = jfl.models.flax(fed, Counted())
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(BATCH))
    grad = jfl.private_grad(task.loss, chain) if private else jfl.grad(task.loss)
    alg = jfl.algorithms.scaffold(grad, lr=0.1, steps=2, batch=jfl.batches.without_replacement(4))
    # chunks of two clients: shapes and the body of the loop over chunks are one trace
    return jfl.plan(fed, task, alg, jfl.sampling.full(clients=CLIENTS), chunk=2)


@pytest.mark.parametrize("private", [False, True])
def test_a_run_traces_the_model_a_few_times(private):
    """Training, the loss and the accuracy each need a trace; shapes and loops need none."""
    plan = plan_of(private)
    run = jfl.init(jax.random.key(0), plan)
    Counted.traces.clear()
    jfl.simulate(jax.random.key(0), plan, rounds=2, start=run)
    assert 0 < len(Counted.traces) <= 4, len(Counted.traces)
