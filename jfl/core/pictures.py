"""How a federation is drawn; matplotlib is imported when somebody draws."""

from typing import Any

import numpy as np

from .lazy import explain_missing_package

MANY = 60  # clients that are drawn one by one


def federation(self: Any, axes: Any = None) -> Any:
    """Draw who has how many rows of which class.

    Each client is a bar as long as its rows, in the colours of its classes, the clients with most
    rows first; of many clients, as many as can be told apart, evenly chosen.  Without classes the
    bars have one colour.

    Args:
        axes: of matplotlib; None: a figure of its own.

    Returns:
        The axes: `fed.plot().figure.savefig("clients.svg")`.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.dirichlet(5, 0.3))
        >>> fed.plot().get_ylabel()
        'rows'
    """
    with explain_missing_package():
        import matplotlib
        from matplotlib.figure import Figure

    if axes is None:
        axes = Figure(figsize=(8, 3.2), layout="constrained").add_subplot()
    sizes = np.asarray(self.size)
    order = np.argsort(-sizes, kind="stable")
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(MANY, len(order))).astype(int))]
    counts = _counts(self, shown)
    colours = matplotlib.colormaps["tab20"].resampled(max(counts.shape[1], 2))
    bottom, places = np.zeros(len(shown)), np.arange(len(shown))
    for label in range(counts.shape[1]):
        name = str(label) if counts.shape[1] > 1 else None
        axes.bar(places, counts[:, label], bottom=bottom, color=colours(label), label=name)
        bottom = bottom + counts[:, label]
    axes.set_xticks(places, [str(c) for c in shown], rotation=90, fontsize=7)
    few = f"{len(shown)} of {len(sizes):,} clients" if len(shown) < len(sizes) else "client"
    axes.set(xlabel=few, ylabel="rows", xlim=(-0.6, len(shown) - 0.4))
    axes.spines[["top", "right"]].set_visible(False)
    if 1 < counts.shape[1] <= 20:
        axes.legend(title="class", fontsize=7, ncols=2, loc="upper right", frameon=False)
    return axes


def _counts(fed: Any, clients: np.ndarray) -> np.ndarray:
    """Int[clients, classes]: rows of each class; one column without classes."""
    if fed.host is not None:
        rows, there = fed.host.rows(clients)
        labels = np.asarray(fed.host.read(rows.reshape(-1))[1]).reshape(rows.shape)
    else:
        rows = np.asarray(fed.index)[clients]
        there = np.arange(rows.shape[1]) < np.asarray(fed.size)[clients, None]
        labels = np.asarray(fed.y)[rows]
    if not fed.classes or labels.ndim > 2:
        return there.sum(1)[:, None]
    one = lambda row, mask: np.bincount(row[mask], minlength=fed.classes)
    return np.stack([one(row, mask) for row, mask in zip(labels, there, strict=True)])
