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
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

import jfl
from jfl.verify import marks

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


def counting_equinox():
    eqx = pytest.importorskip(
        "equinox", reason="equinox is not installed: its calls are not counted"
    )

    class CountingEquinox(eqx.Module):
        drop: eqx.nn.Dropout
        outer: eqx.nn.Linear

        def __call__(self, x, *, key=None):
            count_call()
            return self.outer(self.drop(x, key=key))

    return CountingEquinox(eqx.nn.Dropout(0.5), eqx.nn.Linear(3, 3, key=jax.random.key(0)))


def counting_function(params, x):
    count_call()
    return x @ params


def counting_task(fed, kind):
    if kind == "linen":
        return jfl.models.flax(fed, CountingLinen())
    if kind == "nnx":
        return jfl.models.nnx(fed, CountingNNX)
    if kind == "equinox":
        return jfl.models.equinox(fed, counting_equinox())
    return jfl.models.functions(fed, lambda key: jnp.zeros((3, 3)), counting_function)


@pytest.mark.by_default("linen-True-fedavg", "equinox-True-fedavg", "functions-False-scaffold")
@pytest.mark.parametrize(
    "kind, private, algorithm",
    [
        ("linen", True, "fedavg"),
        ("linen", False, "scaffold"),
        ("nnx", True, "scaffold"),
        ("equinox", True, "fedavg"),
        ("functions", False, "scaffold"),
    ],
)
def test_a_model_is_traced_once(kind, private, algorithm):
    """Training and evaluation may differ, and nnx is looked into in both modes; a plan, its
    guarantee and privacy check, a run, a sweep and another rate add none."""
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
    assert made <= 9
    if private:
        jfl.guarantee(plan, 2)
        assert jfl.check_privacy(plan)
    jfl.simulate(jax.random.key(0), plan, 2)
    jfl.simulate(jax.random.key(0), plan_of_rate(0.2), 2)
    jfl.sweep(plan_of_rate, rounds=2, lr=[0.1, 0.3])
    assert len(CALLS) - made <= 1


class SinhInEvaluation(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3)(x if train else jnp.sinh(x))


def equations(jaxpr, loops=0):
    """Yield the primitive of each equation of a jaxpr, and how many whiles are around it."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, loops
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, loops + (name == "while"))


def test_a_program_has_no_dead_evaluation():
    """The loss and the accuracy of test rows are outside the loop over rounds, and no product of
    matrices is computed in vain; a single round evaluates nothing."""
    fed = make_federation(classes=3)
    task = jfl.models.flax(fed, SinhInEvaluation())
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(0.5), jfl.divide(3))
    grad = jfl.private_grad(task.loss, chain)
    algorithm = jfl.algorithms.fedavg(grad, steps=2, batch=jfl.batches.full())
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS), chunk=2)
    run = jfl.init(jax.random.key(0), plan)
    where = lambda name, jaxpr: [loops for found, loops in equations(jaxpr) if found == name]

    program = jax.make_jaxpr(lambda run: jfl.scan(run, plan, jnp.array([5, 5])))(run).jaxpr
    in_evaluations, in_rounds = 0, 1  # the number of rounds is not known, that of evaluations is
    assert where("sinh", program) == [in_evaluations] * 2
    products = where("dot_general", program)
    assert set(products) == {in_evaluations, in_rounds}
    needed, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    assert where("dot_general", needed) == products
    alone = jax.make_jaxpr(lambda run: jfl.run_round(run, plan))(run).jaxpr
    assert len(where("dot_general", alone)) == products.count(in_rounds)
    assert where("sinh", alone) == []


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


def test_copies_for_clients_are_not_read_again_after_the_loop():
    """XLA keeps no copy beside the value that was copied: a barrier hides that both are equal."""
    copy = jax.vmap(lambda own: marks.copy_per_client(jnp.ones(3), own)[0])
    steps = [e.primitive.name for e in jax.make_jaxpr(copy)(jnp.arange(4)).eqns]
    assert steps[steps.index("optimization_barrier") :][:2] == [
        "optimization_barrier",
        "broadcast_in_dim",
    ]


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
