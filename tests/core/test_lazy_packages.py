"""jfl imports without the packages of the extra "cli", and names the extra when one is missing."""

import subprocess
import sys

from jfl.core.lazy import CLI_PACKAGES

WITHOUT = f"""
import sys
for name in {CLI_PACKAGES!r}:
    sys.modules[name] = None
import jax, jfl, numpy as np
r = np.random.default_rng(0)
x, y = r.normal(size=(40, 3)).astype("float32"), r.integers(0, 2, 40)
fed = jfl.federate(jfl.datasets.arrays(x, y, x[:8], y[:8]), jfl.partition.iid(4))
task = jfl.models.logistic(fed)
noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(4.0), jfl.divide(10))
alg = jfl.algorithms.fedavg(
    jfl.private_grad(task.loss, noise), lr=1.0, steps=1, batch=jfl.batches.full())
plan = jfl.plan(fed, task, alg, jfl.sampling.full(4))
out = jfl.simulate(jax.random.key(0), plan, rounds=2)
print(plan, out, jfl.guarantee(plan, rounds=2), jfl.check_privacy(plan))
for call in (jfl.datasets.digits, fed.plot, lambda: jfl.load("nothing"), lambda: jfl.runs.config):
    try:
        call()
    except ModuleNotFoundError as error:
        assert 'pip install "jfl[cli]"' in str(error), error
    else:
        raise AssertionError(call)
from jfl.cli.__main__ import main
assert main() == 2
"""


def test_python_code_runs_on_the_base_package_and_other_calls_name_the_extra():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count('pip install "jfl[cli]"') == 1  # of the command line
