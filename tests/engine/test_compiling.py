"""The stages before a program runs are reported: tracing, lowering, compiling."""

import logging
import math
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from helpers.problems import CLIENTS, make_federation, same_bits

import jfl
from jfl.engine import compiling


@pytest.fixture
def cold():
    """Make functions that no cache knows, each with a function that JAX traces within it."""

    def make(number):
        inner = jax.jit(lambda x: time.sleep(0.05) or x * number)
        return jax.jit(lambda x: inner(x) + inner(x + 1.0))

    return make


def test_stages_within_a_stage_count_once(cold, caplog):
    caplog.set_level(logging.INFO, "jfl")
    shown, begun = [], time.perf_counter()
    with compiling.report_stages("a program", shown.append) as seconds:
        cold(2.5)(jnp.ones(3)).block_until_ready()
    elapsed = time.perf_counter() - begun
    assert [s for s in shown if s][:3] == ["tracing", "lowering", "compiling"]
    assert shown[-1] == ""
    assert list(seconds) == ["tracing", "lowering", "compiling", "running"]
    assert seconds["tracing"] >= 0.05 and min(seconds.values()) >= 0
    assert sum(seconds.values()) <= elapsed
    (record,) = caplog.records
    pattern = r"a program: \d.\d s tracing, \d.\d s lowering, \d.\d s compiling, \d.\d s running"
    assert record.levelname == "INFO" and re.fullmatch(pattern, record.getMessage())


def test_a_program_within_a_stage_is_not_counted_twice():
    def outer(x):
        with jax.ensure_compile_time_eval():
            jnp.sin(jnp.ones(17))
        time.sleep(0.2)
        return x * 3.25

    begun = time.perf_counter()
    with compiling.report_stages("a program") as seconds:
        jax.jit(outer)(jnp.ones(3)).block_until_ready()
    assert 0.2 <= seconds["tracing"] and sum(seconds.values()) <= time.perf_counter() - begun


def test_a_block_without_compilation_is_silent(cold, caplog):
    caplog.set_level(logging.INFO, "jfl")
    function, x = cold(3.5), jnp.ones(3)
    function(x)
    with compiling.report_stages("known") as seconds:
        function(x)
    assert not caplog.records and sum(seconds.values()) == seconds["running"]


def test_a_slow_start_is_explained_once(cold, caplog, monkeypatch):
    monkeypatch.setattr(compiling, "SLOW_SECONDS", 0.02)
    monkeypatch.setattr(compiling, "_explained", [])
    x = jnp.ones(3)
    with compiling.report_stages("a run that computes for long"):
        time.sleep(0.1)
    assert not caplog.records
    for number in (4.5, 5.5):
        with compiling.report_stages("a slow start"):
            cold(number)(x)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "a slow start: the program is not ready after" in record.getMessage()


def test_a_simulation_names_its_stages(caplog):
    caplog.set_level(logging.INFO, "jfl")
    fed = make_federation(sizes=[4, 5], classes=3)
    task = jfl.models.logistic(fed)
    algorithm = jfl.algorithms.fedavg(
        jfl.grad(task.loss), lr=0.1, steps=1, batch=jfl.batches.full()
    )
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(2))
    jfl.simulate(jax.random.key(0), plan, 1)
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith("fedavg: ") and text.endswith("running")
    caplog.clear()
    jfl.simulate(jax.random.key(1), plan, 3)
    assert not caplog.records
    jfl.sweep(lambda seed: plan, seed=[0, 1], rounds=1)
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith("sweep of 2 points: ")


class PretendedTime:
    """A clock whose seconds pass only in `sleep`, and its timers."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def time(self):
        return self.now

    perf_counter = time

    def start_timer(self, seconds, function):
        timer = [self.now + seconds, function]
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: timer.__setitem__(0, math.inf))

    def sleep(self, seconds):
        end = self.now + seconds
        while self.timers and (timer := min(self.timers, key=lambda t: t[0]))[0] <= end:
            self.timers.remove(timer)
            self.now = timer[0]
            timer[1]()
        self.now = end


@pytest.mark.parametrize(
    "stages, warning",
    [
        ([("compiling", 12)], "10 s (0.0 s tracing, 0.0 s lowering, 10.0 s compiling; now comp"),
        ([("tracing", 9)], None),
        # no stage runs after 10 s, but another one follows
        ([("tracing", 8), ("", 3), ("compiling", 1)], "11 s (8.0 s tracing, 0.0 s lowering, 0.0 s"),
        # the stages are the smaller part of 10 s, and then become the larger one
        ([("", 8), ("compiling", 9)], "16 s (0.0 s tracing, 0.0 s lowering, 8.0 s compiling; now"),
        # a stage that runs when the time is over, and short stages in a long run
        ([("", 8), ("compiling", 5), ("", 20), ("compiling", 4)], None),
    ],
)
def test_when_a_slow_start_is_explained(stages, warning, caplog, monkeypatch):
    pretended, clock = PretendedTime(), compiling._clock()
    monkeypatch.setattr(compiling, "time", pretended)
    monkeypatch.setattr(compiling, "_start_timer", pretended.start_timer)
    monkeypatch.setattr(compiling, "_explained", [])
    events = {stage: event for event, stage in compiling.STAGES.items()}
    with compiling.report_stages("a start"):
        for stage, seconds in stages:
            begun = pretended.now
            if stage:
                clock._begin(events[stage], begun)
            pretended.sleep(seconds)
            if stage:
                clock._end(events[stage], begun, pretended.now)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == (warning is not None)
    assert all(f"a start: the program is not ready after {warning}" in text for text in texts)
    pretended.sleep(1e6)  # the timers of a block that ended say nothing
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == len(texts)


def test_another_number_compiles_nothing():
    """The program, and every small one before and after it, serves all numbers of a plan."""
    fed, compiled = make_federation(classes=3), []
    task = jfl.models.logistic(fed)

    def run(clip=1.0, noise=0.5, lr=0.1, rounds=2, seed=0):
        chain = jfl.chain(jfl.clip_l2(clip), jfl.total(), jfl.gaussian(noise), jfl.divide(3))
        grad = jfl.private_grad(task.loss, chain)
        algorithm = jfl.algorithms.fedavg(grad, lr=lr, steps=2, batch=jfl.batches.full())
        plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))
        return jfl.simulate(jax.random.key(seed), plan, rounds).params

    first = run()
    listen = lambda event, _, **more: (
        event.endswith("backend_compile_duration") and (compiled.append(more))
    )
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for change in (dict(clip=0.1), dict(noise=2.0), dict(lr=0.7), dict(rounds=5), dict(seed=1)):
            assert not same_bits(run(**change), first) and not compiled, change
        jax.jit(lambda x: x + 1)(jnp.ones(3))  # the listener hears
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_a_second_process_compiles_nothing_that_the_first_one_did(tmp_path):
    """Programs of 0.2 s are kept as well, and a missing folder is made."""
    program = """
import sys, time, jax, jax.numpy as jnp, jfl
from jfl.engine import compiling
assert jfl.keep_compiled_programs(sys.argv[1]).as_posix() == sys.argv[1]
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
def slow(x):
    for i in range(60):
        x = jnp.sin(x @ x) + i
    return x
jax.jit(slow)(jnp.ones((3, 3)))
print(sum("cache_hits" in event for event in hits))
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    command = [sys.executable, "-c", program, str(tmp_path / "new" / "programs")]
    hits = [int(subprocess.check_output(command, env=env, text=True)) for _ in range(2)]
    assert hits[0] == 0 and hits[1] >= 1, hits
