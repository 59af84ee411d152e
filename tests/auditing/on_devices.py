"""What test_audit_devices.py runs on 8 CPU devices of one process: a JSON line of each case.

python tests/auditing/on_devices.py shared|own|noise
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

import jfl
from jfl.auditing import canaries, trials
from jfl.engine import devices
from jfl.privacy.guarantees import choose
from jfl.privacy.ledger.entries import entries

# A script does not have the repository and tests/ on its path; `experiments` is that of the former.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers import audit_plans
from helpers.audit_plans import THIRD
from helpers.stated_noise import noise_test

MESSAGES = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def shared():
    """Runs that devices share."""
    plan = audit_plans.of_clients(1.0)
    one, other = (jfl.audit(plan, 2, 1001, mesh=mesh) for mesh in (1, 8))
    mesh = devices.devices(8)
    keys = jax.random.split(jax.random.key(0), 16)
    keys = jax.device_put(keys, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    program = trials._block.lower(keys, plan_watched(plan), 2, mesh).compile()
    seen, _ = trials._block(keys, plan_watched(plan), 2, mesh)
    try:
        jfl.audit(dataclasses.replace(plan, mesh=8), 2, 1001, mesh=8)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return dict(
        same=one == other,
        held=[list(s.data.shape) for s in seen.addressable_shards],
        messages=sorted(set(re.findall(MESSAGES, program.as_text()))),
        refused=refused,
    )


def plan_watched(plan):
    entry = choose("test", plan, entries(plan, 2), unit=None, view=None, adjacency=None)
    return canaries.experiment(plan, entry, 2).inside


def own():
    """Plans that have a mesh: how far the canary is, in deviations of what is seen."""
    made = dict(
        release=(audit_plans.of_clients(1.0), {}),
        uploads=(audit_plans.uploads(1.0), THIRD),
    )
    return {
        name: jfl.audit(dataclasses.replace(plan, mesh=2), 1, 2000, **asked).mu
        for name, (plan, asked) in made.items()
    }


def noise():
    """The noise of uploads on a mesh: what the tests say of it."""
    plan = dataclasses.replace(audit_plans.uploads(1.0), mesh=2)
    report = noise_test(plan, runs=500)
    return dict(failed=report.failed, tests=report.tests)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({name: globals()[name]()}), flush=True)
