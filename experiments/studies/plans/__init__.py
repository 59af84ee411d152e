"""What each study runs and what is checked on it, a file for each: cells, with a config each, and
claims over the rows that come out."""

from collections.abc import Callable

from . import (
    anchors,
    audit,
    claimed,
    cohort,
    correlated,
    customers,
    frontier,
    heterogeneity,
    local_steps,
    promises,
    text,
)

PLANS: dict[str, Callable] = dict(
    frontier=frontier.frontier,
    fashion=frontier.fashion,
    text=text.text,
    heterogeneity=heterogeneity.heterogeneity,
    steps=local_steps.steps,
    cohort=cohort.cohort,
    correlated=correlated.correlated,
    claimed=claimed.claimed,
    audit=audit.audit,
    promises=promises.promises,
    anchors=anchors.anchors,
    customers=customers.customers,
)
