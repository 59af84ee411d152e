"""The caveats of guarantees: what an epsilon assumes, and what it does not cover."""

from ...core.records import Caveat

BARE = Caveat("No privacy: no mechanism of this plan adds noise.", "no-noise")
EVERY_ROUND = Caveat(
    "Assumes the worst case: the client participates in every round.", "every-round"
)
TURNS = Caveat(
    "Assumes the worst case: the client participates in every round of its group, one round in "
    "{f.sampler.separation}.",
    "turns",
)
HONEST = Caveat(
    "Assumes that cohorts are sampled honestly and are not revealed to the third party.",
    "honest-cohort",
)
SIMULATION = Caveat(
    "For simulation only: the noise is float32 from a non-cryptographic generator, so its seed or "
    "its low bits can reveal more than epsilon allows. Anyone who knows the seed can remove the "
    "noise. The low bits of a released number can tell two neighbouring data sets apart: whatever "
    "epsilon is, delta is at least 0.13.",
    "simulation",
)
STOPS = Caveat(
    "Does not cover what an early stop reveals (non-finite values, an empty cohort, an inexact "
    "solve), except for sampling overflow, which delta includes.",
    "stops",
)
PUBLIC = Caveat("Assumes that client sizes, sampling rates and weights are public.", "public-sizes")
# arrays of a sampler that describe clients
OF_CLIENTS = {
    "latency": Caveat("Assumes that the latencies of clients are public.", "public-latencies"),
    "available": Caveat(
        "Assumes that the times at which clients are available are public.", "public-availability"
    ),
    "share": Caveat(
        "Assumes that the probabilities with which clients are drawn are public.", "public-shares"
    ),
}
PERSONAL = Caveat(
    "Does not cover the personal models of clients, which stay with them; view='personal' does.",
    "personal",
)
PERSONAL_BARE = Caveat(
    "Does not cover the personal models of clients: no noise for examples protects them, so they "
    "must stay with their clients.",
    "personal",
)
PERSONAL_TOO = Caveat(
    "Covers uploads and personal models: the observer sees all models of all clients after every "
    "round.",
    "personal-too",
)
PAIRED = Caveat(
    "Sweep points with the same seed share their noise, so releasing several of them together is "
    "not covered.",
    "paired-noise",
)
IMPLIED = Caveat(
    "Follows from the client-level guarantee, which protects each example of a client as well.",
    "implied",
)
IMPLIED_TWICE = Caveat(
    "Follows from the client-level noise: replacing one example changes an upload by up to twice "
    "the clip norm.",
    "implied-twice",
)
ONE_SAMPLE = Caveat(
    "The releases of this algorithm may share a sample, so no privacy amplification by sampling is "
    "counted.",
    "one-sample",
)
PROX_ERM = (
    "Assumes convex, Lipschitz losses, solved accurately enough that replacing one row moves a "
    "client's solution by at most {:g}."
)
CONTRACTION = (
    "Assumes that losses are convex, (2 / lr)-smooth and {:g}-Lipschitz for every row and all "
    "parameters, and have finite gradients."
)
INTEGERS = Caveat(
    "Uploads are integers of {s.encoding.bits} bits per coordinate, and noise is drawn from a "
    "63-bit table.",
    "integers",
)
SECURE = Caveat(
    "Assumes secure aggregation: the server sees only the sum of a cohort's uploads, no client "
    "drops out, and no client reveals its noise.",
    "secure-aggregation",
)
OTHERS = Caveat(
    "Counts the noise of the other clients, and assumes that none of them helps the third party.",
    "others",
)
ASSERTED = "Assumes, without enforcing it, that no client participates more than {} times."
LIKELY = (
    "Assumes honest sampling that is independent of the data. Delta includes the probability {:g} "
    "that a client participates more often than assumed."
)
SEEN = Caveat(
    "Describes this run, with the participations that occurred; it is not a guarantee.", "realised"
)
FOLLOWING = Caveat(
    "Assumes that a segment without a first round continues directly after the previous segment.",
    "following",
)
PLANNED = Caveat(
    "Assumes that the noise and rounds of all segments were fixed before the run; `jfl.budget` "
    "covers those that are chosen from its results.",
    "planned",
)
ADAPTIVE = Caveat(
    "Assumes that noise and rounds are chosen only from public data and from what this view has "
    "seen, and the budget before the run.",
    "adaptive",
)
SEEDS = Caveat("Assumes, without checking, which segments share a seed.", "seeds")
SHARED = Caveat(
    "Each epsilon is that of one point: points with the same seed share samples, so releasing "
    "several of them together is not covered.",
    "shared-seed",
)
