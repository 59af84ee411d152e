"""How often a model is traced: each trace of a real model takes seconds."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.test_util
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers.problems import CLIENTS, make_federation

import jfl

CALLS = []


@jfl.named("tests.count_call")
def count_call():
    CALLS.append(1)


class CountingLinen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        count_call()
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


class CountingNNX(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        count_call()
        return self.outer(self.drop(x))


def counting_function(params, x):
    count_call()
    return x @ params


def counting_task(fed, kind):
    if kind == "linen":
        return jfl.models.flax(fed, CountingLinen())
    if kind == "nnx":
        return jfl.models.nnx(fed, CountingNNX)
    return jfl.models.functions(fed, lambda key: jnp.zeros((3, 3)), counting_function)


@pytest.mark.by_default("linen-True-fedavg", "functions-False-scaffold")
@pytest.mark.parametrize(
    "kind, private, algorithm",
    [
        ("linen", True, "fedavg"),
        ("linen", False, "scaffold"),
        ("nnx", True, "scaffold"),
        ("functions", False, "scaffold"),
    ],
)
def test_a_model_is_traced_once(kind, private, algorithm):
    """Each trace of a large model takes seconds.  Training and evaluation may differ, and nnx is
    looked into in both modes; a plan, its guarantee, a run, a sweep and another rate add none."""
    fed = make_federation(classes=3, held_out=2)
    CALLS.clear()
    task = counting_task(fed, kind)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(0.5), jfl.divide(3))
    grad = jfl.private_grad(task.loss, chain) if private else jfl.grad(task.loss)

    def plan_of_rate(lr):
        make = getattr(jfl.algorithms, algorithm)
        made = make(grad, lr=lr, steps=2, batch=jfl.batches.full())
        return jfl.plan(fed, task, made, jfl.sampling.full(CLIENTS), chunk=2)

    plan = plan_of_rate(0.1)
    made = len(CALLS)
    assert made <= 13
    if private:
        jfl.guarantee(plan, 2)
    jfl.simulate(jax.random.key(0), plan, 2)
    jfl.simulate(jax.random.key(0), plan_of_rate(0.2), 2)
    jfl.sweep(plan_of_rate, rounds=2, lr=[0.1, 0.3])
    assert len(CALLS) - made <= 2


@jax.custom_batching.custom_vmap
def count_batching(x):
    return x


@count_batching.def_vmap
def count_batching_rule(size, batched, x):
    CALLS.append(size)
    return count_batching(x), batched[0]


@jfl.named("tests.counting_sgd")
def counting_sgd(lr):
    def update(gradient, state, params):
        return jax.tree.map(lambda g: -lr * count_batching(g), gradient), state

    return optax.GradientTransformation(lambda params: (), update)


def test_a_local_step_is_batched_over_clients_once(fed, task):
    """Without the copies of `marks.copy_per_client`, JAX batches the loop of steps twice."""
    algorithm = jfl.algorithms.fedavg(
        jfl.grad(task.loss), steps=2, batch=jfl.batches.full(), optimizer=counting_sgd
    )
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))
    run = jfl.init(jax.random.key(0), plan)
    CALLS.clear()
    jax.eval_shape(jfl.run_round, run, plan)
    assert CALLS == [CLIENTS] * len(jax.tree.leaves(run.server.params))


def test_a_round_can_be_differentiated(fed, task):
    """Derivatives by the server's model pass through the copies of the clients."""
    algorithm = jfl.algorithms.fedavg(jfl.grad(task.loss), steps=2, batch=jfl.batches.full())
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))
    run = jfl.init(jax.random.key(0), plan)

    @jax.jit
    def size_after_a_round(params):
        server = dataclasses.replace(run.server, params=params)
        after, _ = jfl.run_round(dataclasses.replace(run, server=server), plan)
        return sum((x**2).sum() for x in jax.tree.leaves(after.server.params))

    jax.test_util.check_grads(
        size_after_a_round, (run.server.params,), order=1, modes="rev", rtol=1e-2
    )
