"""`jfl new algorithm NAME`: a file of one's own, its test and its card."""

import dataclasses
import keyword
from pathlib import Path

from ..core import checks
from ..core.options import field
from .options import parse

ALGORITHM = '''"""NAME: say in a sentence what clients and server do, and who published it."""

import dataclasses

import jax

import jfl
from jfl import Fn
from jfl.core.options import extends


def client(context, keys, server, client_state, rows, *, work, mu):
    """What one client does: local steps from the server's model, and what it uploads.

    No clipping, noise, sampling or weighting here: `work.grad` and `jfl.plan` do these.
    """

    def correct(gradient, params, step):
        """Your change of a local step; it reads no row, so it costs no privacy."""
        pull = jax.tree.map(lambda w, start: mu * (w - start), params, server.params)
        return jax.tree.map(lambda g, p: g + p, gradient, pull)

    trained, _, _, seen = jfl.local.train(work, context, keys, server.params, rows, correct)
    upload = jax.tree.map(lambda new, old: new - old, trained, server.params)
    return upload, client_state, seen


@extends(jfl.algorithms.fedavg)
def NAME(grad, *, mu: float = 0.1, **fedavg_options):
    """FedAvg with your change.

    Args:
        grad: jfl.grad(loss), or jfl.private_grad(loss, mechanism).
        mu: what your change is scaled by.

    Example:
        >>> import jfl
        >>> NAME(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), lr=0.1).name
        'NAME'
    """
    base = jfl.algorithms.fedavg(grad, **fedavg_options)
    # numbers in `data`: plans that differ in one share a program, and a sweep over it is a vmap
    data = dict(base.client.data, mu=float(mu))
    return dataclasses.replace(base, client=Fn(client, data), name="NAME")
'''

TEST = '''"""NAME: what it computes, and what is proved of it.  Run with pytest."""

import jax
import jax.numpy as jnp
import numpy as np
from NAME import NAME

import jfl

CLIENTS, ROWS, STEPS, LR, MU = 4, 6, 3, 0.1, 0.5


def loss(params, x, y):
    return 0.5 * (x @ params - y) ** 2


def federation():
    r = np.random.default_rng(0)
    rows = {c: (r.normal(size=(ROWS, 2)), r.normal(size=ROWS)) for c in range(CLIENTS)}
    return jfl.federate(rows, holdout=0.2, classes=0)


def plan_of(grad, **options):
    algorithm = NAME(grad, lr=LR, steps=STEPS, mu=MU, batch=jfl.batches.full(), **options)
    task = jfl.task(jnp.zeros(2), loss)
    return jfl.plan(federation(), task, algorithm, jfl.sampling.full(CLIENTS))


def test_it_is_its_pseudo_code():
    """A loop in NumPy, which shares no code with the algorithm."""
    plan = plan_of(jfl.grad(loss))
    fed, w = plan.fed, np.zeros(2)
    for _ in range(2):
        uploads = []
        for index, size in zip(np.asarray(fed.index), np.asarray(fed.size)):
            x, y = np.asarray(fed.x)[index[:size]], np.asarray(fed.y)[index[:size]]
            v = w
            for _ in range(STEPS):
                v = v - LR * (x.T @ (x @ v - y) / size + MU * (v - w))
            uploads.append(v - w)
        w = w + np.mean(uploads, 0)
    trained = jfl.simulate(jax.random.key(0), plan, 2).params
    np.testing.assert_allclose(trained, w, rtol=1e-5)


def test_what_is_proved():
    """Nothing reaches an upload but by way of the noisy gradients."""
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(ROWS))
    plan = plan_of(jfl.private_grad(loss, chain))
    print(jfl.check_privacy(plan))
    assert jfl.guarantee(plan, 10, delta=1e-5).status == "proved"
'''

CARD = """# NAME

| | |
|---|---|
| what it does | FedAvg with ... |
| published in | author, title, venue, year, algorithm number |
| differs from the paper | ... |
| hyperparameters | `mu`: ... (0.1); those of `fedavg` |
| clients remember | nothing |
| uploads | the difference of models |
| releases, for examples | `steps` noisy gradients a participation |
| releases, for clients | the sum of clipped uploads, by `jfl.plan(release=...)` |

`jfl.check_privacy(plan)` says what of this is proved for the functions that run.
"""


@dataclasses.dataclass(frozen=True)
class New:
    """An algorithm of one's own: NAME.py, test_NAME.py and NAME.md, ready to run and to change.

    example: jfl new algorithm fedmine --out mine
    """

    out: Path = field(Path("."), "the directory they are written to")


def new(arguments: list[str]) -> None:
    """`jfl new algorithm NAME`: three files, none of which may be there."""
    words = [word for word in arguments[:2] if not word.startswith("-")]
    command = parse(New, arguments[len(words) :], "jfl new algorithm NAME")
    if not words or words[0] != "algorithm" or len(words) < 2:
        checks.fail("jfl new", "algorithm NAME", " ".join(words) or "nothing")
    name = words[1]
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        checks.fail("jfl new algorithm", "a name of Python, such as fedmine", repr(name))
    files = {f"{name}.py": ALGORITHM, f"test_{name}.py": TEST, f"{name}.md": CARD}
    there = [file for file in files if (command.out / file).exists()]
    if there:
        checks.fail(
            "jfl new algorithm",
            "files that are not there yet",
            ", ".join(str(command.out / file) for file in there),
            "Nothing is overwritten: take another name or --out.",
        )
    command.out.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (command.out / file).write_text(content.replace("NAME", name))
    print(f"{', '.join(files)} in {command.out}. Try: cd {command.out} && pytest test_{name}.py")
