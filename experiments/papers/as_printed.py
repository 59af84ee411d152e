"""Compute the epsilon that a paper claims for a plan, and the noise that its formula chooses.

This is the mode "as_printed". A claim is not a guarantee. `claimed` returns the number that the
paper would print for a run of the plan, with its status and caveats; `jfl.guarantee` returns what
is proved for the noise that ran.
"""

import math
from typing import Any

import numpy as np

from jfl.auditing.audit import AuditReport
from jfl.core import checks
from jfl.core.errors import NotAnalysable
from jfl.core.records import Fn, Guarantee, Plan, named
from jfl.local.training import sum_of_rates
from jfl.privacy.accountants.rdp_events import check_delta
from jfl.privacy.accountants.tightest import smallest
from jfl.privacy.guarantees import quick_epsilons
from jfl.privacy.ledger import entries
from jfl.privacy.ledger.entry import with_noise
from jfl.privacy.mechanisms import chain as mechanism
from jfl.privacy.mechanisms.chain import bound, multipliers, noisy

from .chen2024 import claims as chen2024
from .li2025 import claims as li2025
from .noble2022 import claims as noble2022
from .talaei2024 import claims as talaei2024

PAPERS = dict(
    fedavg="noble2022",
    fedsgd="noble2022",
    scaffold="noble2022",
    dpnfl="chen2024",
    addpnfl="chen2024",
    output_perturbation="li2025",
    padpfl="talaei2024",
)
NAMES = tuple(dict.fromkeys(PAPERS.values())) + ("ranaweera2025",)
WHERE = "as_printed"  # in messages
UPLINKS = 1  # uploads of a client that an eavesdropper sees: talaei2024 gives no number


def claimed(
    plan: Plan, rounds: int, delta: float = 1e-5, paper: str | None = None, view: str = "server"
) -> Guarantee:
    """Return what a paper's formula claims for `rounds` rounds, for the worst client.

    Args:
        plan: what runs.
        rounds: number of rounds.
        delta: in (0, 1).
        paper: "noble2022" (either view), "chen2024" or "li2025" (the server's view; its epsilon is
            for one round, and by its Theorem 2 with c_0 = 1 for the whole run): unit example,
            replace_one.  "ranaweera2025": an accountant applied to the multiplier that
            `wavelet.published` states. "talaei2024": each broadcast for the view third_party, one
            upload for the view server. None: the paper of the algorithm or of the noise.
        view: "server" or "third_party".

    Raises:
        ValueError: if the formula does not cover the plan.  For the first three papers, it needs
            noise in local steps of clipped examples, batches of a fixed size, and for noble2022
            one multiplier.

    Example:
        >>> PAPERS["scaffold"]
        'noble2022'
    """
    paper = _asked(plan, rounds, delta, paper, view)
    value, method, caveats, *kind = _CLAIMS[paper](plan, rounds, delta, view)
    unit, adjacency = kind or ("example", "replace_one")
    return Guarantee(
        value,
        float(delta),
        unit,
        adjacency,
        view,
        method,
        "claimed",
        caveats,
        rounds=1 if paper == "li2025" else None,
    )


def claimed_beside(plan: Plan, rounds: int, audit: AuditReport) -> float | None:
    """Return the epsilon that the plan's paper claims for the unit and view of an audit.

    It is None if the paper's formula does not cover the plan, or is for another unit, adjacency or
    number of rounds.
    """
    try:
        claim = claimed(plan, rounds, audit.delta, view=audit.view)
    except ValueError:
        return None
    alike = (claim.unit, claim.adjacency) == (audit.unit, audit.adjacency)
    if not alike or claim.rounds not in (None, rounds) or not math.isfinite(claim.epsilon):
        return None
    return float(claim.epsilon)


def calibrate(
    plan: Plan,
    *,
    epsilon: float,
    rounds: int,
    delta: float = 1e-5,
    paper: str | None = None,
    view: str = "server",
):
    """Return the noise multiplier that a paper's formula chooses.

    The plan defines everything except the noise. Put the result into its chain; `jfl.guarantee`
    then computes what is proved.

    Args:
        plan: what runs.
        epsilon: the target, > 0.
        rounds: number of rounds.
        delta: in (0, 1).
        paper: as in `claimed`.
        view: "server" or "third_party".

    Returns:
        A number, or Float32[C] if it differs between clients. For talaei2024 it is a standard
        deviation: of the noise of an upload for the view server, otherwise of the noise of the
        release, which is 0 if the uploads have enough noise.

    Raises:
        ValueError: as `claimed`; for noble2022 also if its bound cannot reach epsilon.
    """
    paper = _asked(plan, rounds, delta, paper, view)
    checks.require_positive(WHERE, single=True, epsilon=epsilon)
    return _NOISES[paper](plan, float(epsilon), rounds, delta, view)


def claims(
    plan: Plan, rounds: int, delta: float, paper: str | None = None
) -> tuple[Guarantee, ...]:
    """Return `claimed` for each view that the paper covers."""
    return tuple(claimed(plan, rounds, delta, paper, view) for view in views(plan, paper))


def views(plan: Plan, paper: str | None = None) -> tuple:
    """Return the views that a paper covers."""
    paper = _paper(plan, paper)
    if paper == "ranaweera2025":
        return ("third_party",) if _claimed(plan.release) is not None else ("server",)
    return ("server", "third_party") if paper in ("noble2022", "talaei2024") else ("server",)


def _asked(plan, rounds, delta, paper, view) -> str:
    paper = _paper(plan, paper)
    checks.require_integer(WHERE, rounds=rounds)
    check_delta(delta)
    checks.require_one_of(WHERE, views(plan, paper), view=view)
    return paper


def _paper(plan, paper) -> Any:
    checks.require_type(WHERE, Plan, "jfl.plan", plan=plan)
    chains = (plan.release, *(r.mechanism for r in plan.algorithm.releases))
    wavelet = any(_claimed(m) is not None for m in chains)
    paper = (
        ("ranaweera2025" if wavelet else PAPERS.get(plan.algorithm.name))
        if paper is None
        else paper
    )
    checks.require_one_of(WHERE, NAMES, paper=paper)
    if paper == "ranaweera2025" and not wavelet:
        checks.fail(
            WHERE,
            "noise of wavelet.published for ranaweera2025",
            "other noise",
        )
    if paper == "talaei2024" and (
        plan.algorithm.name != "padpfl" or plan.sampler.scheme != "full" or not noisy(plan.upload)
    ):
        checks.fail(
            WHERE,
            "algorithms.padpfl, all clients and noisy uploads for talaei2024",
            f"{plan.algorithm.name}, sampling.{plan.sampler.scheme}, upload={plan.upload!r}",
        )
    if paper in ("ranaweera2025", "talaei2024"):
        return paper
    release = plan.algorithm.releases[0] if plan.algorithm.releases else None
    if (
        release is None
        or len(plan.algorithm.releases) > 1
        or release.batches.scheme not in ("without_replacement", "epochs", "with_replacement")
        or (release.batches.scheme != "without_replacement" and paper != "li2025")
    ):
        checks.fail(
            WHERE,
            f"batches of a fixed size, without replacement, for the formula of {paper}",
            "none" if release is None else f"batches.{release.batches.scheme}",
        )
    if release.mechanism is not None and release.mechanism.adjacency == "add_remove":
        checks.fail(WHERE, "adjacency replace_one", "add_remove")
    if (release.steps > 0) != (paper == "li2025"):
        checks.fail(
            WHERE,
            "algorithms.output_perturbation for li2025, and only for it",
            plan.algorithm.name,
        )
    if plan.sampler.scheme not in (
        "full",
        "without_replacement",
        "with_replacement",
        "first_responders",
    ):
        checks.fail(
            WHERE,
            "a cohort of fixed size",
            f"sampling.{plan.sampler.scheme}",
        )
    return paper


def _client_data(plan):
    """Return the hyperparameters of the client, also under algorithms.averaged."""
    data = plan.algorithm.client.data
    while "inner" in data:
        data = data["inner"].data
    return data


def _rows(plan):
    sizes = np.asarray(plan.fed.size).reshape(-1)
    return np.where(sizes > 0, sizes, sizes.max())  # a client without rows claims nothing


def _own(plan, rounds):
    """Return noise multipliers [rounds or 1, clients or 1] of the client's noise."""
    alg = plan.algorithm
    mechanism = (
        _client_data(plan)["mechanism"] if alg.releases[0].steps else alg.releases[0].mechanism
    )
    if not noisy(mechanism):
        checks.fail(WHERE, "noise of the client's own", "none")
    return multipliers(mechanism, rounds, plan.sampler.clients)


# --- Noble, Bellet, Dieuleveut 2022


def _noble_run(plan, rounds):
    release = plan.algorithm.releases[0]
    share = plan.sampler.capacity / plan.sampler.clients
    return (
        min(share, 1.0),
        min(release.batches.batch / _rows(plan).min(), 1.0),
        release.count,
        rounds,
    )


def _noble(plan, rounds, delta, view):
    z = _own(plan, rounds)
    if z.size > 1:
        checks.fail(
            WHERE,
            "one noise multiplier for all rounds and clients",
            "several",
        )
    share, s, steps, rounds = _noble_run(plan, rounds)
    why = (noble2022.third_party_epsilon.claim.why,)
    if view == "server":
        return (
            noble2022.server_epsilon(z.item(), s, steps, rounds, delta),
            "noble2022, Theorem 4.1 (server)",
            (),
        )
    value = noble2022.third_party_epsilon(
        z.item(), share, s, steps, rounds, plan.sampler.clients, delta
    )
    return float(value), "noble2022, numbers of section 5", why


def _noble_noise(plan, epsilon, rounds, delta, view):
    share, s, steps, rounds = _noble_run(plan, rounds)
    if view == "third_party":
        return noble2022.noise_for(epsilon, share, s, steps, rounds, plan.sampler.clients, delta)
    return smallest(
        WHERE,
        lambda z: noble2022.server_epsilon(z, s, steps, rounds, delta),
        epsilon,
    )


# --- Chen, Ding, Bao, Zhou, Jin 2024


def _chen_run(plan, rounds):
    release = plan.algorithm.releases[0]
    often = chen2024.expected_participations(rounds, plan.sampler.clients, plan.sampler.capacity)
    return often, release.count, 1.0, release.batches.batch, _rows(plan)


def _chen(plan, rounds, delta, view):
    z = _own(plan, rounds)
    if len(z) > 1:
        checks.fail(WHERE, "the same noise in all rounds", "noise that changes")
    often, steps, clip_norm, batch, rows = _chen_run(plan, rounds)
    sigma = z[0] * 2 * clip_norm / np.minimum(batch, rows)
    # the value of the formula even if preconditions fail; those are listed in the caveats
    missed = chen2024.dpnfl_tcdp(often, steps, clip_norm, batch, rows, sigma).failed
    rho = 26 * often * steps * (clip_norm / (rows * sigma)) ** 2
    omega = (batch * sigma / clip_norm) ** 2 * np.log(np.maximum(rows / batch, 1)) / 8
    whole = np.asarray(
        chen2024.lemma2(
            often * steps * 2 * (clip_norm / (np.minimum(batch, rows) * sigma)) ** 2, np.inf, delta
        )
    )
    sampled = np.asarray(chen2024.lemma2(rho, np.maximum(omega, 1 + 1e-9), delta))
    caveats = (
        f"counts the expected {often} participations, which about half of the clients exceed",
    )
    caveats += tuple(f"a precondition of Lemma 4 fails: {f}" for f in missed)
    value = np.where(omega > 1, sampled, whole)  # without an order to use, Lemma 4 gives nothing
    return float(value.max()), "chen2024, Theorem 5 at this delta", caveats


def _chen_noise(plan, epsilon, rounds, delta, view):
    often, steps, clip_norm, batch, rows = _chen_run(plan, rounds)
    calibrated = chen2024.calibrate_sigma(epsilon, delta, often, steps, clip_norm, batch, rows)
    return (np.asarray(calibrated.value) * np.minimum(batch, rows) / (2 * clip_norm)).astype(
        np.float32
    )


# --- Li, Wang, Wu 2025


def _li_run(plan, rounds):
    """Return steps, sampling rates, and the last and summed learning rates.

    The sampling rate of a round is per client, the learning rates are [rounds].
    """
    release = plan.algorithm.releases[0]
    work = _client_data(plan)["work"]
    used = release.steps * release.batches.batch
    if (used > _rows(plan)).any():
        checks.fail(
            WHERE,
            f"at least steps * batch = {used} rows in every client",
            f"{_rows(plan).min()}",
            "Its sampling rate is their ratio.",
        )
    begins = release.steps * np.arange(
        rounds if callable(work.lr) else 1
    )  # of a rate that is fixed, once
    last = np.array([float(sum_of_rates(work.lr, b + release.steps - 1, 1)) for b in begins])
    total = np.array([float(sum_of_rates(work.lr, b, release.steps)) for b in begins])
    return release.steps, used / _rows(plan), last, total


def _li(plan, rounds, delta, view):
    steps, rate, last, total = _li_run(plan, rounds)
    # the std of what is added to the gradient, over what eq. (20) takes for the sensitivity
    multiplier = _own(plan, rounds) * (2 * total / last / (4 * steps * last))[:, None]
    once = float((2 * rate * np.sqrt(2 * np.log(1.25 * rate / delta)) / multiplier).max())
    chance = plan.sampler.capacity / plan.sampler.clients
    caveats = ("of one round", "made for the sensitivity of the model and added to the gradient")
    if rate.max() < 1:
        whole = float(
            li2025.total_epsilon_heuristic(once, float(rate.max()), min(chance, 1.0), rounds)
        )
        caveats += (f"Theorem 2 with c_0 = 1 says {whole:.4g} for {rounds} rounds",)
    return once, "li2025, eq. (20), one round", caveats


@named("printed.std")
def printed_std(round_, *, constant, work_lr, steps):
    """Return the noise std of Algorithm 1 as printed, in units of the mean gradient of a round.

    It is lr^2 constant / (sum of lr).
    """
    last = sum_of_rates(work_lr, round_ * steps + steps - 1, 1)
    return constant * last**2 / sum_of_rates(work_lr, round_ * steps, steps)


def _li_noise(plan, epsilon, rounds, delta, view):
    release = plan.algorithm.releases[0]
    clip_norm = float(bound(_client_data(plan)["mechanism"]))
    std = li2025.noise_std_printed(
        1.0, release.steps, clip_norm, release.batches.batch, _rows(plan), epsilon, delta
    ).value
    work = _client_data(plan)["work"]
    return Fn(
        printed_std,
        dict(constant=np.asarray(std, np.float32), work_lr=work.lr),
        dict(steps=release.steps),
    )


# --- Ranaweera et al. 2025


def _claimed(chain) -> Any:
    """Return the multiplier that the paper states for the noise of a chain, or None."""
    stage = mechanism.noise_of(chain)
    return None if stage is None else stage.claimed


def _ranaweera_entry(plan, view):
    unit = "client" if view == "third_party" else "example"
    chain = plan.release if unit == "client" else plan.algorithm.releases[0].mechanism
    entry = next(e for e in entries.entries(plan, 1) if (e.unit, e.view) == (unit, view))
    return entry, float(_claimed(chain))


def _ranaweera_epsilon(entry, z, rounds, delta):
    if entry.refusal:
        raise NotAnalysable(entry.refusal)
    # sampling as it is, and an accountant of Renyi bounds, as the paper has it, which knows neither
    # an overflow nor that noise ends
    ideal = with_noise(entry, z)._replace(overflow=0.0, normals=0.0)
    return float(quick_epsilons(ideal, np.array([rounds]), delta)[0][0])


def _ranaweera(plan, rounds, delta, view):
    entry, z = _ranaweera_entry(plan, view)
    return (
        _ranaweera_epsilon(entry, z, rounds, delta),
        "ranaweera2025, section 4.2, at its own multiplier",
        ("the sensitivity of the weighted coefficients is not what it is taken for",),
        entry.unit,
        entry.adjacency,
    )


def _ranaweera_noise(plan, epsilon, rounds, delta, view):
    entry, _ = _ranaweera_entry(plan, view)
    return smallest(
        WHERE,
        lambda z: _ranaweera_epsilon(entry, z, rounds, delta),
        epsilon,
    )


# --- Talaei, Izadi 2024


def _talaei_run(plan, rounds, delta):
    """Return clip norm, impact factors [rounds or 1, C], smallest rows, and the Gaussian factor."""
    weights = (
        [plan.weights]
        if not isinstance(plan.weights, Fn)
        else [plan.weights(r) for r in range(rounds)]
    )
    impact = np.stack([np.asarray(w, np.float64) for w in weights])
    impact = impact / impact.sum(1, keepdims=True)
    return (
        float(bound(plan.upload)),
        impact,
        int(_rows(plan).min()),
        float(talaei2024.gaussian_factor(delta)),
    )


def _talaei_std(plan):
    """Return the std of the noise of an upload, and of the server's noise in the average."""
    server = 0.0
    if noisy(plan.release):
        most = float(
            np.max(np.asarray(plan.weights(0) if isinstance(plan.weights, Fn) else plan.weights))
        )
        server = mechanism.multiplier(plan.release, most) * float(
            mechanism.sensitivity(plan.release, max_weight=most)
        )
        server /= mechanism.denominator(plan.release) or 1.0
    return mechanism.multiplier(plan.upload) * float(mechanism.sensitivity(plan.upload)), server


def _talaei(plan, rounds, delta, view):
    clip_norm, impact, rows, factor = _talaei_run(plan, rounds, delta)
    client, server = _talaei_std(plan)
    sensitivity = float(talaei2024.client_sensitivity_paper(clip_norm, rows))
    if view == "server":
        return (
            sensitivity * UPLINKS * factor / client,
            f"talaei2024, eq. (8), R = {UPLINKS}",
            (
                talaei2024.client_noise_std_printed.claim.why,
                "the server sees every upload, not R of them",
            ),
        )
    total = np.hypot([float(talaei2024.aggregated_client_std(client, p)) for p in impact], server)
    value = float((sensitivity * impact.max(1) * rounds * factor / total).max())
    return (
        value,
        "talaei2024, Theorem 1",
        (talaei2024.required_std_printed.claim.why, "of each round alone"),
    )


def _talaei_noise(plan, epsilon, rounds, delta, view):
    clip_norm, impact, rows, factor = _talaei_run(plan, rounds, delta)
    if view == "server":
        return float(
            talaei2024.client_noise_std_printed(clip_norm, UPLINKS, factor, rows, epsilon).value
        )
    return max(
        float(
            talaei2024.server_noise_std_printed(
                clip_norm, UPLINKS, rounds, factor, p, rows, epsilon
            ).value
        )
        for p in impact
    )


_CLAIMS = dict(
    noble2022=_noble, chen2024=_chen, li2025=_li, ranaweera2025=_ranaweera, talaei2024=_talaei
)
_NOISES = dict(
    noble2022=_noble_noise,
    chen2024=_chen_noise,
    li2025=_li_noise,
    ranaweera2025=_ranaweera_noise,
    talaei2024=_talaei_noise,
)
