"""What one client does with its rows and keys: read from what `flow` followed through its jaxpr."""

import collections
import functools
import inspect
import math
import os
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.records import Context, Keys, Plan, Rows
from ..kernels import normals
from ..privacy.mechanisms import chain as mech
from .declarations import batch_words, chain_words, declared_of
from .flow import Flow, is_key
from .ownership import bits_of
from .tracing import abstract, avals, cached, key_shape, params_shapes, row_shapes

SHOWN = 7  # steps of a path that are printed

HERE = os.path.abspath(__file__).rsplit(os.sep, 2)[0]  # of jfl

QUIET = (
    "convert_element_type",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "copy",
    "stop_gradient",
    "select_n",
    "slice",
    "unstack",
)

SOURCES = (
    "rows",
    "draw",
    "batch",
    "example",
    "bounded",
    "kept",
    "opaque",
)  # what no payload may hold


class Released(NamedTuple):
    """One site at which a client releases something."""

    mechanism: str  # its stages
    times: int | None  # a participation; None: nobody can count them
    key: str  # where its noise is from
    reads: Any  # which rows, in words


class Verdict(NamedTuple):
    example: tuple
    client: tuple
    releases: tuple
    consts: list
    shapes: Any  # of the server's state and of a payload; None where the client cannot be traced


def context_shapes():
    number = lambda kind: jax.ShapeDtypeStruct((), kind)
    return [
        number(jnp.int32),
        number(jnp.int32),
        number(jnp.int32),
        number(jnp.float32),
        number(jnp.float32),
    ]


def traced(plan: Plan, keeps: bool = False) -> Verdict:
    """Return the verdict on the client of a plan; plans that differ only in numbers share it.

    Args:
        plan: a Plan.
        keeps: whether what the client keeps and its personal model must be protected as well.
    """
    declared = declared_of(plan)
    parts = (plan.algorithm.client, tuple((r.mechanism, r.batches) for r in declared))
    leaves = jax.tree.leaves(parts)
    first, classes = {}, []
    for x in leaves:  # numbers that are equal are one
        classes.append(first.setdefault(bits_of(x), len(first)))
    name = (
        "client",
        avals(parts),
        tuple(classes),
        tuple((r.count, r.steps) for r in declared),
        plan.algorithm.stateful,
        avals((plan.task.init, plan.algorithm.init)),
        avals(row_shapes(plan)),
        plan.fed.index.shape[-1],
        plan.sampler.clients,
        (avals(plan.algorithm.personal),) if keeps else (),
    )
    return cached(name, lambda: trace_client(plan, declared, parts, classes, keeps))


def trace_client(plan, declared, parts, classes, keeps=False) -> Verdict:
    x, y = row_shapes(plan)
    slots = x.shape[0] if plan.fed.host is not None else plan.fed.index.shape[-1]
    leaves, structure = jax.tree.flatten(abstract(parts))
    structures = []

    def program(leaves, context, keys, server, client_state, rows):
        client, releases = structure.unflatten(leaves)
        round_, id_, size, weight, cohort = context
        context = Context(round_, id_, size, weight, plan.sampler.clients, cohort)
        payload, kept, _ = client(
            context,
            Keys(*keys),
            server,
            client_state,
            Rows(rows[0], rows[1], rows[2], context.size),
        )
        if keeps:
            payload = payload, kept, plan.algorithm.personal(server, kept)
        now = [(mech.at_round(m, context.round), b) for m, b in releases]
        structures[:] = [tuple(map(jax.tree.structure, r)) for r in now]
        return payload, kept, [[jax.tree.leaves(part) for part in r] for r in now]

    try:
        server, client_state_ = jax.eval_shape(plan.algorithm.init, params_shapes(plan))
        operands = (
            leaves,
            context_shapes(),
            [key_shape(), key_shape()],
            server,
            client_state_,
            [x, y, jax.ShapeDtypeStruct((slots,), jnp.int32)],
        )
        closed, shapes = jax.make_jaxpr(program, return_shape=True)(*operands)
        judge = Judge(plan, declared, classes, operands, closed, shapes, structures, keeps)
        return judge.verdict()
    except Exception as error:  # the algorithm is the user's, and so is its error
        why = (f"the client could not be followed: {checks.describe_error(error)}",)
        return Verdict(why, why, (), [], None)


class Judge:
    """Reads what a Flow found of one client."""

    def __init__(self, plan, declared, classes, operands, closed, shapes, structures, keeps=False):
        self.plan, self.declared, self.closed = plan, declared, closed
        self.operands, self.shapes, self.structures = operands, shapes, structures
        self.classes = classes
        paths = lambda tree, name: [
            name + jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        ]
        # with `keeps`, the observer sees three things: the payload, the new state and the model
        seen = zip(shapes[0], ("payload", "own", "personal")) if keeps else [(shapes[0], "payload")]
        self.names = [path for tree, name in seen for path in paths(tree, name)]
        self.names += paths(shapes[1], "own")
        self.shows = "sends or keeps" if keeps else "sends"
        self.sent = len(jax.tree.leaves(shapes[0]))
        self.example, self.client = [], []

    def follow(self, tainted=()):
        """One run, with those leaves of what the client remembers holding data."""
        flow = self.flow = Flow()
        leaves, context, keys, server, kept, rows = self.operands
        give = lambda name, aval, *sources: flow.input(name, aval, *sources)
        self.at = {}

        def named(name, aval, *sources):
            value = give(name, aval, *sources)
            self.at[name] = value.symbol
            return value

        values = [give(("leaf", c), a) for c, a in zip(self.classes, leaves)]
        # under add_remove, one row more or less changes the number of rows
        secret = any(r.mechanism.adjacency == "add_remove" for r in self.declared)
        values += [
            named(n, a, *([("size", "rows.size")] if n == "size" and secret else []))
            for n, a in zip(("round", "client", "size", "weight", "cohort"), context)
        ]
        values += [
            named("keys.batch", keys[0], ("draw", "keys.batch")),
            named("keys.noise", keys[1], ("key", "keys.noise")),
        ]
        values += [give(("server", i), a) for i, a in enumerate(jax.tree.leaves(server))]
        values += [
            give(("own", i), a, ("own", i), *([("kept", i)] if i in tainted else []))
            for i, a in enumerate(jax.tree.leaves(kept))
        ]
        values += [
            named(f"rows.{n}", a, ("rows", f"rows.{n}")) for n, a in zip(("x", "y", "index"), rows)
        ]
        outs = flow.closed(self.closed, values)
        many = len(self.names)
        self.outs, rest = outs[:many], outs[many:]
        self.charged = []  # (mechanism, batches) of each declared release, by symbols
        for (mechanism, batches), (a, b) in zip(self.structures, self.shapes[2]):
            numbers, rest = rest[: len(a)], rest[len(a) :]
            rates, rest = rest[: len(b)], rest[len(b) :]
            self.charged.append(
                (
                    (mechanism, tuple(v.symbol for v in numbers)),
                    (batches, tuple(v.symbol for v in rates)),
                )
            )

    def verdict(self):
        tainted, ways = set(), {}
        while True:
            self.follow(tainted)
            new = {}
            for i, out in enumerate(self.outs[self.sent :]):
                for token, path in out.tokens.items():
                    if (
                        token[0] in (*SOURCES, "size")
                        and token[0] != "kept"
                        and i not in tainted
                        and i not in new
                    ):
                        new[i] = self.way(token, path, self.names[self.sent + i])
                    if token[0] == "kept" and i not in tainted and i not in new:
                        new[i] = self.way(token, path, self.names[self.sent + i], ways)
            if not new:
                break
            tainted |= set(new)
            ways |= new
        self.leaks(ways)
        released = self.released()
        rows = self.sites(released)
        once = lambda findings: tuple(dict.fromkeys(findings))
        shapes = (self.operands[3], self.shapes[0])
        consts = [c for c in self.flow.consts.values() if not isinstance(c, jax.core.Tracer)]
        return Verdict(once(self.example), once(self.client), rows, consts, shapes)

    # --- what reaches the payload

    def leaks(self, ways):
        """Notes what reaches the payload, or what the client remembers, without noise."""
        self.unprotected_examples(ways)
        self.unprotected_clients()
        for name, out, aval in zip(self.names, self.outs, jax.tree.leaves(self.shapes[:2])):
            if is_key(aval) and ("key", "keys.noise") in out.tokens:
                self.example.append(f"a noise key outlives its round: {name}")
        if not self.plan.algorithm.stateful and any(
            t[0] == "own" for o in self.outs[: self.sent] for t in o.tokens
        ):
            self.client.append("clients remember, and stateful=True is not declared")

    def unprotected_examples(self, ways):
        """Sources of the payload: one path of each kind, the worst kind first."""
        sources = {}
        for name, out in zip(self.names[: self.sent], self.outs):
            for token, path in out.tokens.items():
                if token[0] in (*SOURCES, "size"):
                    detail = token[1] if token[0] in ("rows", "opaque", "draw") else ""
                    sources.setdefault((token[0], detail), (token, path, name))
        rank = {kind: i for i, kind in enumerate((*SOURCES, "size"))}
        rows_leak = any(kind == "rows" for kind, _ in sources)
        for (kind, _), (token, path, name) in sorted(
            sources.items(), key=lambda item: rank[item[0][0]]
        ):
            way = self.way(token, path, name, ways)
            if kind == "opaque":
                self.example.append(f"what {token[1]} does: {way}")
            elif kind == "size":
                self.example.append(
                    "the number of rows, which adjacency add_remove changes, reaches what the "
                    f"client sends without noise: {way}"
                )
            elif kind != "draw":
                self.example.append(f"rows reach what the client {self.shows} without noise: {way}")
            elif not rows_leak:
                self.example.append(
                    f"which rows were drawn reaches what the client {self.shows}: {way}"
                )

    def unprotected_clients(self):
        """Noise for whole clients comes later: a client may read its own rows, and no others."""
        for name, out in zip(self.names, self.outs):
            for token, path in out.tokens.items():
                if token[0] == "rows" and token[1] != "rows.index":
                    self.client.append(
                        "rows are read other than by batches.gather, perhaps another client's: "
                        + self.way(token, path, name)
                    )
                if token[0] == "opaque":
                    self.client.append(f"what {token[1]} does: {self.way(token, path, name)}")
        for mark in self.flow.marks.values():
            if mark.kind == "jfl_batch" and not self.reads(mark)[0]:
                self.client.append(
                    "rows are read that may be another client's: gather needs rows as the client "
                    "got them, "
                    "with slots of batches.drawn or a mask of slots < rows.size"
                )

    def way(self, token, path, name, ways=None):
        """A path as text: from the source, by the steps that say something, to where it comes
        out."""
        steps, last, source = [], None, token[1]
        while path is not None:
            path, equation = path
            primitive = equation.primitive.name
            last = last or _line(equation)
            if (
                primitive not in QUIET
                and not primitive.startswith("jfl_")
                and (not steps or steps[-1] != primitive)
            ):
                steps.append(primitive)
        steps.reverse()
        if len(steps) > SHOWN:
            steps = steps[:2] + ["..."] + steps[-(SHOWN - 3) :]
        begin = source
        if token[0] in ("batch", "example", "bounded"):
            begin = "rows"
        if token[0] == "kept":
            begin = (ways or {}).get(source, "own")
            begin = begin.split(" (")[0]
        if token[0] == "opaque":
            steps = [s for s in steps if s != token[1]]
        return " -> ".join([begin, *steps, name]) + (f" ({last})" if last else "")

    # --- the releases

    def released(self):
        """The releases that the payload holds, now or in a later round."""
        sent, kept, todo = self.outs[: self.sent], set(), list(self.outs[: self.sent])
        while todo:  # what is remembered is sent once the payload reads it
            for i in {t[1] for t in todo.pop().tokens if t[0] == "own"} - kept:
                kept.add(i)
                todo.append(self.outs[self.sent + i])
        outs = [*sent, *(self.outs[self.sent + i] for i in sorted(kept))]
        return list(dict.fromkeys(t[1] for o in outs for t in o.tokens if t[0] == "released"))

    def times(self, mark):
        sizes = [self.flow.length[loop] for loop in mark.loops] + [
            size for size, _ in mark.params["batch"]
        ]
        return None if None in sizes else math.prod(sizes)

    def sites(self, released):
        flow, rows, counted = self.flow, [], collections.Counter()
        every = {n: m for n, m in flow.marks.items() if m.kind == "jfl_release"}
        for name in released:
            mark = every[name]
            times, site = self.times(mark), self.site(mark)
            key, reads, charged = site
            rows.append(Released(self.stages(mark), times, self.said(key), reads))
            if times is None:
                self.example.append(
                    f"{self.stages(mark)}: releases in a loop without a fixed number of passes"
                )
            elif charged is not None:
                counted[charged] += times
        for charged, times in counted.items():
            declared = sum(
                r.count for i, r in enumerate(self.declared) if self.class_of(i) == charged
            )
            if times > declared:
                self.example.append(
                    f"{times} releases, {declared} declared: "
                    f"{chain_words(self.declared[charged].mechanism)}"
                )
        self.keys(every, released)
        self.draws(released)
        return tuple(rows)

    def class_of(self, i):
        """The first declared release that is charged as this one is."""
        alike = lambda j: (
            (self.charged[j], bool(self.declared[j].steps))
            == (self.charged[i], bool(self.declared[i].steps))
        )
        return next(j for j in range(i + 1) if alike(j))

    def stages(self, mark):
        mechanisms = [
            r.mechanism for r, c in zip(self.declared, self.charged) if c[0] == self.mechanism(mark)
        ]
        return chain_words(mechanisms[0]) if mechanisms else "a chain that is not declared"

    def mechanism(self, mark):
        skip = {"jfl_release": 2 * mark.params["n"] + 3, "jfl_bounded": mark.params["n"] + 1}[
            mark.kind
        ]
        return mark.params["structure"], tuple(o.symbol for o in mark.operands[skip:])

    def site(self, mark):
        """(key, what it reads in words, which declared release it is); what is wrong with it is
        noted."""
        flow, n = self.flow, mark.params["n"]
        note = self.example.append
        where = f"a release of {self.stages(mark)}"
        key, weight, client = mark.operands[2 * n : 2 * n + 3]
        noise_key = flow.key(key.symbol)
        if mark.params["outside"]:
            note(f"{where}: inside a shard_map, where it is not followed")
        if noise_key[0] != self.at["keys.noise"]:
            note(
                f"{where}: its noise key does not come from keys.noise, so it is the same again in "
                f"other rounds or clients"
            )
        if flow.nodes[weight.symbol][0] != "lit" or flow.nodes[weight.symbol][3] != 1.0:
            note(f"{where}: another max_weight than 1")
        if mark.params["each"] and client.symbol != self.at["client"]:
            note(f"{where}: the noise level of another client")
        bound = flow.bounds(mark)
        reads = "rows"
        if bound is None:
            way = next(
                (
                    self.way(t, path, "release")
                    for o in mark.operands[n : 2 * n]
                    for t, path in o.tokens.items()
                    if t[0] in SOURCES
                ),
                "",
            )
            note(f"noise on a sum that no row stage of its chain bounds{': ' + way if way else ''}")
            return noise_key, reads, None
        bound = flow.marks[bound]
        if self.mechanism(bound) != self.mechanism(mark):
            note(f"{where}: the sum is bounded by another chain than its noise is of")
        if bound.params["batch"] or mark.params["batch"]:
            note(f"{where}: under a vmap of the client's own, where it is not followed")
        if bound.params["kind"] == "single":
            return noise_key, *self.single(mark, bound, where)
        return noise_key, *self.examples(mark, bound, where)

    def examples(self, mark, bound, where):
        """A sum over the rows of a batch, each by itself."""
        flow, note = self.flow, self.example.append
        reference = flow.nodes[bound.operands[bound.params["n"]].symbol]
        group = (
            reference[1]
            if reference[0] == "mark" and flow.marks[reference[1]].kind == "jfl_example"
            else None
        )
        for o in bound.operands:
            for token, path in o.tokens.items():
                if token[0] in SOURCES and token != ("example", group):
                    what = (
                        f"what {token[1]} does"
                        if token[0] == "opaque"
                        else "rows reach the gradient of another row"
                    )
                    note(f"{what}: {self.way(token, path, 'clipped sum')}")
        if group is None:
            note(f"{where}: contributions that are not seen to be of one row each")
            return "rows", None
        given = [flow.nodes[o.symbol] for o in flow.marks[group].operands[:3]]
        names = {g[1] for g in given if g[0] == "mark"}
        if (
            len(names) != 1
            or [g[2] for g in given if g[0] == "mark"] != [0, 1, 2]
            or flow.marks[g := names.pop()].kind != "jfl_batch"
        ):
            note(f"{where}: a batch that was changed, or not read by batches.gather")
            return "rows", None
        fine, batches, address = self.reads(flow.marks[g])
        if not fine:
            note(f"{where}: rows that are not seen to be the client's own")
            return "rows", None
        for i, r in enumerate(self.declared):
            if (
                not r.steps
                and self.charged[i][0] == self.mechanism(mark)
                and (
                    self.charged[i][1] == batches
                    or r.batches.scheme == "full"
                    and batches in (None, "full")
                )
            ):
                mark.params["address"], mark.params["scheme"] = address, r.batches.scheme
                return batch_words(r.batches), self.class_of(i)
        note(f"{where}: declared neither with this chain, nor with such batches")
        return "rows", None

    def single(self, mark, bound, where):
        """One contribution of the whole client, of whatever it was made."""
        flow, note = self.flow, self.example.append
        weight = self._constant(bound.operands[bound.params["n"]].symbol)
        if weight != 1.0:
            note(f"{where}: a contribution whose weight is not seen to be 1")
        used = self.read_by(bound)
        raw = [
            (t, path)
            for o in bound.operands
            for t, path in o.tokens.items()
            if t[0] in ("rows", "opaque")
        ]
        for token, path in raw:
            what = (
                f"what {token[1]} does"
                if token[0] == "opaque"
                else "rows are read other than by batches.gather"
            )
            note(f"{what}: {self.way(token, path, 'release')}")
        read = [self.reads(flow.marks[b]) for b in used]
        if not all(fine for fine, _, _ in read):
            note(f"{where}: rows that are not seen to be the client's own")
        for i, r in enumerate(self.declared):
            if self.charged[i][0] != self.mechanism(mark) or r.mechanism.adjacency != "replace_one":
                continue
            batches = [b for _, b, _ in read]
            looks: list[Any] = [self.within(flow.marks[b], mark) for b in used]
            if r.batches.scheme == "full":
                return batch_words(r.batches, r.steps), self.class_of(i)
            if (
                all(b == self.charged[i][1] for b in batches)
                and None not in looks
                and sum(looks) <= max(r.steps, 1)
            ):
                for b, (_, _, address) in zip(used, read):
                    flow.marks[b].params["address"], flow.marks[b].params["scheme"] = (
                        address,
                        r.batches.scheme,
                    )
                mark.params["used"] = used
                return batch_words(r.batches, r.steps), self.class_of(i)
        note(
            f"{where}: declared neither with this chain under replace_one, nor with so many such "
            f"batches"
        )
        return "rows", None

    def within(self, batch, mark):
        """How often a batch is drawn for one of the releases; those are in loops around both."""
        sizes = [self.flow.length[loop] for loop in batch.loops if loop not in mark.loops]
        return None if None in sizes else math.prod(sizes)

    def read_by(self, bound) -> list:
        """The batches that went into a sum, by whatever way."""
        flow, todo, seen, out = self.flow, [t for o in bound.operands for t in o.tokens], set(), []
        while todo:
            token = todo.pop()
            if token in seen or token[0] not in ("batch", "example", "bounded", "released"):
                continue
            seen.add(token)
            if token[0] == "batch":
                out.append(token[1])
            mark = flow.marks.get(token[1])
            if mark is not None and token[0] != "batch":
                todo += [t for o in mark.operands for t in o.tokens]
        return out

    def reads(self, mark):
        """(whether a gather reads rows of the client alone, its batches by symbols, the address of
        their draw)."""
        flow = self.flow
        x, y, index, size, slots, mask = (o.symbol for o in mark.operands[3:9])
        given = {"rows.x": x, "rows.y": y, "size": size} | (
            {"rows.index": index} if self.plan.fed.host is None else {}
        )
        if any(self.at[name] != symbol for name, symbol in given.items()) or mark.params["batch"]:
            return False, None, None
        drawn: list[Any] = [self.drawn(s) for s in (slots, mask)]
        if (
            all(d is not None for d in drawn)
            and drawn[0][0] == drawn[1][0]
            and (drawn[0][1], drawn[1][1]) == (0, 1)
            and drawn[0][2] == drawn[1][2]
        ):
            of, loop = flow.marks[drawn[0][0]], drawn[0][2]
            key, step, size = (o.symbol for o in of.operands[2:5])
            if size != self.at["size"]:
                return False, None, None
            steps = flow.affine(step)
            steps = steps if loop is None else flow._placed(steps, {("index", loop): 1}, 0)
            root, path = flow.key(key)
            path = path if loop is None else flow._moved((root, path), {("index", loop): 1}, 0)[1]
            batches = of.params["structure"], tuple(o.symbol for o in of.operands[5:])
            return True, batches, (root, (*path, ("child", steps)))
        test = flow.nodes[mask]  # slots below the client's size, whatever they are
        if test[:2] == ("op", "lt") and test[3] == slots and self._same(test[4]) == self.at["size"]:
            return True, "full", None
        return False, None, None

    def drawn(self, symbol):
        """(mark of a draw, which of its results, the loop that goes through it)."""
        content, loop = self.flow.nodes[symbol], None
        if content[0] == "elem":
            loop, content = content[1], self.flow.nodes[content[2]]
            if content[:2] == ("op", "broadcast_in_dim"):  # a mask that all steps share
                content = self.flow.nodes[content[3]]
        if content[0] != "mark" or self.flow.marks[content[1]].kind != "jfl_slots":
            return None
        batch = self.flow.marks[content[1]].params["batch"]
        of = self.flow.shapes[self.flow.node("mark", content[1], content[2])][-1:]
        if (
            (loop is None) != (not batch)
            or len(batch) > 1
            or batch
            and any(d not in (0, -1) for d in batch[0][1])
            or self.flow.shapes[symbol] != of
        ):
            return None
        return content[1], content[2], loop

    def _same(self, symbol):
        """A symbol before it was only stored otherwise."""
        content = self.flow.nodes[symbol]
        while content[0] == "op" and content[1] in (
            "broadcast_in_dim",
            "convert_element_type",
            "reshape",
            "squeeze",
        ):
            symbol = content[3]
            content = self.flow.nodes[symbol]
        return symbol

    def _constant(self, symbol):
        content = self.flow.nodes[self._same(symbol)]
        return content[3] if content[0] == "lit" else None

    # --- keys

    def keys(self, every, released):
        """Each release has a key of its own, and nothing else draws from it."""
        flow, note = self.flow, self.example.append
        keys = {n: flow.key(m.operands[2 * m.params["n"]].symbol) for n, m in every.items()}
        for name in released:
            mark, key = every[name], keys[name]
            if key[0] != self.at["keys.noise"]:
                continue
            if set(flow.covers(key, mark.loops)) != set(mark.loops):
                note(f"the passes of a loop share one noise key: {self.said(key)}")
            for other, theirs in keys.items():
                if (
                    other != name
                    and not (other in released and other < name)
                    and theirs[0] == key[0]
                    and not flow.apart(key, theirs)
                ):
                    note(
                        f"two releases share one noise key: {self.said(key)} and "
                        f"{self.said(theirs)}"
                    )
        for symbol, equation in flow.drawn.values():
            root, steps = flow.key(symbol)
            if root != self.at["keys.noise"]:
                continue
            for name in released:
                if keys[name][0] == root and self.above(steps, keys[name][1]):
                    line = _line(equation)
                    note(
                        (
                            f"{equation.primitive.name} reads the noise key of a release, "
                            f"{self.said((root, steps))}"
                        )
                        + (f" ({line})" if line else "")
                    )
                    break

    def above(self, steps, below) -> bool:
        """True if a key may be that of a release, or one from which it descends."""
        cut = lambda path: path[
            : next((i for i, s in enumerate(path) if s[0] == "often"), len(path))
        ]
        one, other = cut(steps), cut(below)
        if len(one) == len(steps) and len(other) == len(below) and len(steps) > len(below):
            return False
        return not any(self.flow._differ(s, t) for s, t in zip(one, other))

    def draws(self, released):
        """Batches that count as independent samples are drawn from addresses of their own."""
        flow, note = self.flow, self.example.append
        used = []
        for name in released:
            mark = flow.marks[name]
            if "address" in mark.params:
                used.append((mark.params["address"], mark.params["scheme"], mark.loops))
            for b in mark.params.get("used", ()):
                batch = flow.marks[b]
                used.append((batch.params["address"], batch.params["scheme"], batch.loops))
        seen = []
        for address, scheme, loops in used:
            if scheme == "full" or address is None:
                continue
            if address[0] != self.at["keys.batch"]:
                note(
                    "batches are not drawn from keys.batch, so they are the same again in other "
                    "rounds or clients"
                )
            elif scheme == "epochs":
                if not self.in_turn(address, loops) or any(a[0] == address[0] for a in seen):
                    note("batches of epochs that are not taken step by step from 0")
            elif flow.covers(address, loops) != set(loops) or any(
                not flow.apart(address, a) for a in seen
            ):
                note("batches that count as independent draws share one draw")
            seen.append(address)

    def in_turn(self, address, loops):
        atoms, first = address[1][-1][1]
        return (
            len(address[1]) == 1
            and first == 0
            and len(loops) <= 1
            and atoms == {("index", loop): 1 for loop in loops}
        )

    def said(self, key) -> str:
        """A key as one would write it."""
        root, steps = key
        names = {symbol: name for name, symbol in self.at.items()}
        text = names.get(root, "a key that is not the client's")
        for step in steps:
            if step[0] == "often":
                text = f"{text}, split again and again"
                continue
            atoms, constant = step[1]
            parts = [
                "step" if a[0] == "index" else "place" if a[0] == "place" else "a number"
                for a in atoms
            ]
            parts += [str(constant)] if constant or not parts else []
            text = f"fold_in({text}, {' + '.join(parts)})"
        return text


@functools.cache
def _site():
    return tuple(
        {os.path.dirname(os.path.dirname(os.path.abspath(str(m.__file__)))) for m in (jax, np)}
        | {os.path.dirname(os.path.abspath(str(m.__file__))) for m in (inspect, normals)}
    )


def _line(equation) -> str:
    """Where the user's own code made an equation: "client, mine.py:12"; "" where jfl or a library
    did."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        name = frame.file_name
        if name == __file__:  # beyond it are those who asked
            return ""
        if name.startswith((HERE, *_site(), "<frozen")):
            continue
        return (
            f"{frame.function_name.rsplit('.', 1)[-1]}, {os.path.basename(name)}:{frame.line_num}"
        )
    return ""
