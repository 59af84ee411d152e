"""Noise that the clients of a cohort add together: each a share, so that their sum has enough.

For secure aggregation, where nobody sees more than the sum of a cohort's uploads.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from ...core import checks
from ...core.records import Fn, Mechanism, Task
from . import integers, stages
from .chain import chain

MAX_BITS = 16  # of a coordinate, if nobody says how many
LAWS = ("gaussian", "discrete_gaussian", "skellam")


class Distributed(NamedTuple):
    """The two chains of `distributed`, for `jfl.plan(upload=..., release=...)`."""

    upload: Mechanism
    release: Mechanism


def distributed(
    noise_multiplier: float,
    clip_norm: float,
    cohort: int,
    *,
    law: str = "gaussian",
    like: Task | Any = None,
    bits: int | None = None,
    deviations: float = 4.0,
    adjacency: str = "zero_out",
) -> Distributed:
    """Noise of which each client of a cohort adds a share: nobody adds it all, and under secure
    aggregation nobody sees an upload that has less.

    Args:
        noise_multiplier: of the sum of a cohort: its noise over the sensitivity, > 0.
        clip_norm: of an upload, > 0, in its units.
        cohort: clients of a round, always as many: each adds 1 / cohort of the variance.
        law: "gaussian", on real numbers; "discrete_gaussian" or "skellam", on integers modulo
            2^bits, as a deployed aggregation sums them.
        like: a Task, or what is uploaded (arrays or their shapes); for integers.
        bits: of a coordinate, for integers; cohort * 2^bits <= 2^25.  None: as many as this noise
            and cohort allow, at most 16.
        deviations: how many standard deviations of a sum's coordinate fit into the bits.
        adjacency: "zero_out" or "replace_one".

    Returns:
        Chains `upload` and `release`, the latter the mean over the cohort.

    Privacy:
        view "aggregate" of a client, in a plan with secure_aggregation=True: conditional on that
        aggregation, on no client dropping out, and on clients that keep their noise secret.
        Rounding lengthens uploads, which the bound counts: the noise multiplier of the integers is
        a little below the one asked for.

    Raises:
        ValueError: outside those ranges; for noise that is too wide or too many clients for the
            bits.

    References:
        Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism", ICML 2021; Agarwal,
        Kairouz, Liu, "The Skellam mechanism", NeurIPS 2021.

    Example:
        >>> import jfl
        >>> pair = jfl.distributed(1.0, 0.5, 20, law="skellam", like=np.zeros(100), bits=12)
        >>> [stage.name for stage in pair.upload.stages]
        ['clip_l2', 'total', 'skellam']
    """
    where = "distributed"
    checks.require_positive(
        where, noise_multiplier=noise_multiplier, clip_norm=clip_norm, deviations=deviations
    )
    checks.require_integer(where, cohort=cohort)
    if bits is not None:
        checks.require_integer(where, bits=bits)
    checks.require_one_of(where, LAWS, law=law)
    checks.require_one_of(where, ("zero_out", "replace_one"), adjacency=adjacency)
    start = stages.clip_l2(clip_norm), stages.total()
    if law == "gaussian":
        share = stages.gaussian(noise_multiplier / math.sqrt(cohort))
        upload = chain(*start, share, adjacency=adjacency)
        return Distributed(upload, chain(stages.total(), stages.divide(cohort)))
    if like is None:
        checks.fail(
            where,
            f"like=task, or what a client uploads, beside law={law!r}",
            "like=None",
            "What rounding adds hangs on the size of an upload.",
        )
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(stages.shapes_like(like)))
    numbers = float(noise_multiplier), float(clip_norm), int(cohort), int(size), MAX_BITS
    encoding = integers.Encoding(law, *numbers, float(deviations), adjacency)
    encoding = encoding._replace(bits=_bits_that_fit(encoding, bits))
    noise = stages.Stage(
        None,
        noise=checks.as_scalar(noise_multiplier),
        encoding=encoding,
        name=law,
        role="noise",
        law=law,
    )
    decode = stages.Stage(
        Fn(integers.decode, static=dict(encoding=encoding)), name="modular_sum", role="post"
    )
    return Distributed(
        chain(*start, noise, adjacency=adjacency),
        chain(stages.total(), decode, stages.divide(cohort)),
    )


def _bits_that_fit(encoding: integers.Encoding, bits: int | None) -> int:
    """Return `bits`, or the most bits that fit if None.

    Raises:
        ValueError: if a sum of the cohort or the noise of a client does not fit, with the bits
            that would.
    """
    cohort = encoding.cohort

    def fits(bits: int) -> bool:
        if cohort * 2**bits > 2 * integers.EXACT:
            return False
        tried = encoding._replace(bits=bits)
        return integers.fits(tried.scale * tried.share)

    if bits is not None and fits(int(bits)):
        return int(bits)
    # below this many bits a sum has no room for its deviations
    fewest = math.floor(math.log2(cohort * encoding.deviations**2) / 2) + 1
    possible = [b for b in range(MAX_BITS, max(fewest, 1) - 1, -1) if fits(b)]
    if bits is None and possible:
        return possible[0]
    given = (
        f"bits={bits}" if bits is not None else f"noise_multiplier={encoding.noise_multiplier:g}"
    )
    return checks.fail(
        "distributed",
        "cohort * 2^bits <= 2^25, whose sums float32 holds exactly, and noise of at most "
        f"{integers.WIDEST} whole numbers a client",
        f"cohort={cohort} and {given}",
        f"Use fewer bits: at most bits={possible[0]}, or bits=None, which chooses them."
        if possible
        else "Use a smaller cohort.",
    )


def encoding_of(mechanism: Mechanism | None) -> integers.Encoding | None:
    """How the uploads of a mechanism become integers; None where they do not."""
    found = (s.encoding for s in (mechanism.stages if mechanism else ()) if s.encoding is not None)
    return next(found, None)


def refuse(where: str, mechanism: Mechanism | None, site: str) -> None:
    """Integers with a share of noise are for uploads."""
    encoding = encoding_of(mechanism)
    if encoding is not None:
        checks.fail(where, f"{encoding.law} noise in upload only", f"it in {site}")


def refuse_unlike(where: str, upload: Mechanism | None, release: Mechanism, weights: Any) -> None:
    """A sum of integers is undone by the release that was made with it, of clients that weigh the
    same."""
    encoding = encoding_of(upload)
    decoding = [s.apply.static["encoding"] for s in release.stages if s.name == "modular_sum"]
    if encoding is None and not decoding:
        return
    plain = len(release.stages) > 1 and [s.name for s in release.stages[:2]] == [
        "total",
        "modular_sum",
    ]
    if decoding != [encoding] or not plain:
        checks.fail(
            where,
            "upload and release of one jfl.distributed(...)",
            f"upload={upload!r}, release={release!r}",
        )
    if (
        isinstance(weights, Fn)
        or not checks.is_concrete(weights)
        or np.any(np.asarray(weights) != 1)
    ):
        checks.fail(
            where,
            'weights="uniform" beside integers, whose sum is taken modulo 2^bits',
            "other weights",
        )
