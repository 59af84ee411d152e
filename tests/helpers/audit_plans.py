"""Small plans of each kind, for audits."""

import jfl
from experiments.papers import as_printed
from helpers.problems import make_federation, squared, start_params

CLIENTS, ROWS = 4, 8
FED = make_federation(sizes=(ROWS,) * CLIENTS)
TASK = jfl.task(start_params(), squared)


def chain(z, *clip, divide=3.0):
    return jfl.chain(*clip or (jfl.clip_l2(0.8),), jfl.total(), jfl.gaussian(z), jfl.divide(divide))


def of_records(z, batch, steps=1, name="fedavg", sampler=None, **options):
    grad = jfl.private_grad(squared, chain(z))
    algorithm = getattr(jfl.algorithms, name)(grad, steps=steps, lr=0.3, batch=batch, **options)
    return jfl.plan(FED, TASK, algorithm, sampler or jfl.sampling.full(CLIENTS))


def of_clients(z, sampler=None, release=None, name="fedavg", **options):
    algorithm = getattr(jfl.algorithms, name)(
        jfl.grad(squared), steps=2, lr=0.1, batch=jfl.batches.full()
    )
    if release is not None or "upload" not in options:
        options["release"] = chain(z) if release is None else release
    return jfl.plan(FED, TASK, algorithm, sampler or jfl.sampling.full(CLIENTS), **options)


def uploads(z, server=None):
    sent = jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(z))
    return of_clients(None, upload=sent, **({} if server is None else dict(release=server)))


def output_perturbation(z):
    noise = jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(z))
    algorithm = jfl.algorithms.output_perturbation(
        jfl.grad(squared), noise, lr=0.1, steps=2, batch=jfl.batches.full()
    )
    return jfl.plan(FED, TASK, algorithm, jfl.sampling.full(CLIENTS))


def ellipsoid(z):
    shape = jfl.wavelet.ellipsoid(jfl.bands.flat(start_params()))
    noise = jfl.gaussian(z, shape=shape)
    stages = jfl.wavelet.clip_ellipsoid(0.5, shape), jfl.total(), noise, jfl.divide(CLIENTS)
    return of_clients(None, release=jfl.chain(*stages))


def published(z):
    """Noise as Ranaweera et al. print it: the multiplier that it states is not the true one."""
    made = jfl.bands.flat(start_params())
    clip, noise = jfl.wavelet.published("R1", 1.0, z, made, unsound=True)
    return of_clients(None, release=jfl.chain(clip, jfl.total(), noise, jfl.divide(CLIENTS)))


def padpfl_as_printed(epsilon, rows, view):
    """Noise on uploads, and on their mean, as Talaei and Izadi print it for one round."""
    fed = make_federation(sizes=(rows,) * CLIENTS)
    padpfl = jfl.algorithms.padpfl(jfl.grad(squared), lr=0.02, steps=5)
    of = lambda std: jfl.plan(
        fed,
        TASK,
        padpfl,
        jfl.sampling.full(CLIENTS),
        upload=jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(std=std)),
    )
    claimed = as_printed.claimed(of(1.0), 1, 1e-2, view=view).epsilon
    return of(claimed / epsilon)  # it is inverse to the noise


sampling, batches = jfl.sampling, jfl.batches
adaptive = lambda: jfl.chain(
    jfl.clip_adaptive(1.0, indicator=1.0, count=4.0),
    jfl.total(),
    jfl.gaussian(1.0),
    jfl.divide(CLIENTS),
)
both = lambda: jfl.chain(
    jfl.bounded(0.8, "upload"), jfl.total(), jfl.gaussian(1.0), jfl.divide(CLIENTS)
)
SERVER, THIRD = dict(view="server"), dict(view="third_party")

# name -> plan, rounds, unit and view, the share of what is proved that is shown at least
PLANS = {
    "record full": (lambda: of_records(1.0, batches.full()), 1, {}, 0.65),
    "record poisson, rounds": (lambda: of_records(2.0, batches.poisson(4)), 4, {}, 0.6),
    "record fixed": (lambda: of_records(0.7, batches.without_replacement(4)), 1, {}, 0.6),
    "record with replacement": (lambda: of_records(1.0, batches.with_replacement(4)), 1, {}, 0.6),
    # the proof counts each of the steps, and an upload shows their sum
    "record epochs": (lambda: of_records(1.0, batches.epochs(4), 2), 2, {}, 0.4),
    # nothing is credited for the noise of other clients
    "record third party": (
        lambda: of_records(1.0, batches.full(), sampler=sampling.without_replacement(4, 2)),
        1,
        THIRD,
        0.1,
    ),
    "record scaffold": (lambda: of_records(2.0, batches.full(), 2, "scaffold"), 3, {}, 0.65),
    # the bound covers a change of every step
    "record output perturbation": (lambda: output_perturbation(1.0), 1, {}, 0.1),
    "client": (lambda: of_clients(1.0), 1, {}, 0.65),
    "client, weights": (lambda: of_clients(1.0, weights=[1.0, 2.0, 3.0, 4.0]), 1, {}, 0.65),
    "client fixed": (lambda: of_clients(0.7, sampling.without_replacement(4, 2)), 1, {}, 0.6),
    # 1.6 rounds in a thousand draw more clients than there is room for, which delta pays for
    "client overflow": (lambda: of_clients(1.2, sampling.poisson(4, 0.2, capacity=3)), 1, {}, 0.4),
    "client layers": (
        lambda: of_clients(1.0, release=chain(1.0, jfl.clip_per_layer((0.5, 0.8)))),
        1,
        {},
        0.65,
    ),
    "client adaptive": (lambda: of_clients(1.0, release=adaptive()), 2, {}, 0.6),
    "client shaped": (lambda: ellipsoid(1.0), 1, {}, 0.65),
    "upload": (lambda: uploads(1.0), 1, SERVER, 0.65),
    "upload, noise of all": (lambda: uploads(1.0), 1, THIRD, 0.65),
    "upload and release": (lambda: uploads(1.0, both()), 1, THIRD, 0.5),
}
