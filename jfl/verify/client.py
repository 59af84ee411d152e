"""The verdict on a client: does data reach its upload or state without a declared release?

The client is traced with abstract arrays, `flow` follows its rows and keys through the program, and
`Judge` compares the result with the releases that the algorithm declares.
"""

import collections
import os
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import checks, contract
from ..core.records import Context, Keys, Plan, Rows
from ..kernels import normals
from ..privacy.mechanisms import chain as mech
from . import marks
from .flow import Flow, Place, first_overlap, is_key, may_be_equal
from .trust import bits_of, declared_releases

SIZE = "the number of rows, which adjacency add_remove changes,"
# Kinds of tokens (see `flow`) that no payload may have, the worst first.  "size" is the number of
# rows, under add_remove.
SOURCES = ("rows", "draw", "batch", "example", "bounded", "kept", "opaque", "size")

MAX_STEPS_SHOWN = 7  # of a path in a finding
STEPS_NOT_SHOWN = (
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


class Released(NamedTuple):
    """A release in a client, described for a report."""

    mechanism: str  # the names of its stages
    times: int  # per participation
    key: str  # the keys of its noise
    reads: Any  # a phrase about the rows that it reads


class Verdict(NamedTuple):
    """Findings about a client, as sentences; () if there are none."""

    example: tuple  # findings against guarantees for examples
    client: tuple  # findings against guarantees for clients
    releases: tuple  # of Released
    consts: list  # arrays that the client holds
    shapes: Any  # of the server's state and of a payload; None if the client cannot be traced


def describe_chain(mechanism) -> str:
    """Return the names of a chain's stages, for reports."""
    return " -> ".join(s.name for s in mechanism.stages)


def describe_batches(batches, steps=0) -> str:
    """Return a phrase about the rows that a release reads, for reports."""
    has_size = batches.batch is not None and batches.scheme not in ("full", "poisson")
    size = f"({batches.batch})" if has_size else ""
    return f"rows of batches.{batches.scheme}{size}" + (f", {steps} steps" if steps else "")


# --- shapes and caches

TRACES: collections.OrderedDict = collections.OrderedDict()
MAX_TRACES = 256


def cached(name, make):
    """Return make(), computed once per name; the results of the last MAX_TRACES names are kept."""
    if name not in TRACES:
        TRACES[name] = make()
        while len(TRACES) > MAX_TRACES:
            TRACES.popitem(last=False)
    TRACES.move_to_end(name)
    return TRACES[name]


def abstract(value):
    """Return the shapes and dtypes of a pytree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)


def shapes_key(value):
    """Return a hashable description of the structure, shapes and dtypes of a pytree."""
    leaves, structure = jax.tree.flatten(value)
    return structure, tuple((jnp.shape(x), str(jnp.result_type(x))) for x in leaves)


def key_shape():
    """Return the shape and dtype of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def row_shapes(plan: Plan) -> tuple:
    """Return the shapes of the rows x and y that a client receives."""
    fed = plan.fed
    if fed.host is None:
        return abstract((fed.x, fed.y))
    kinds = zip(fed.host.kind, (fed.host.shape, ()))
    return tuple(jax.ShapeDtypeStruct((fed.host.slots, *rest), kind) for kind, rest in kinds)


def params_shapes(plan: Plan):
    """Return the shapes of the model parameters."""
    init = plan.task.init
    return cached(("params", shapes_key(init)), lambda: jax.eval_shape(init, key_shape()))


def state_shapes(plan: Plan) -> tuple:
    """Return the shapes of the state of the server, and of that of a client."""
    init = plan.algorithm.init
    name = ("state", shapes_key((plan.task.init, init)))
    return cached(name, lambda: jax.eval_shape(init, params_shapes(plan)))


def hides_state(plan: Plan) -> bool:
    """Return whether clients keep a state that the algorithm does not declare as `stateful`."""
    if plan.algorithm.stateful:
        return False
    try:
        return bool(jax.tree.leaves(state_shapes(plan)[1]))
    except Exception:  # an algorithm that does not start cannot run
        return False


def context_shapes() -> Context:
    """Return the shapes of the numbers in a Context, of which the number of clients is static."""
    dtypes = (jnp.int32,) * 3 + (jnp.float32, jnp.int32, jnp.float32)
    shapes: list[Any] = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
    return Context(*shapes)


# --- the verdict


def judge_client(plan: Plan, keeps: bool = False) -> Verdict:
    """Return what the check of a plan's client function found against its guarantees.

    The check traces the function: private data may reach the server only through the releases that
    the plan declares.  Plans that differ only in numbers share one verdict.

    Args:
        plan: a Plan.
        keeps: whether the new client state and the personal model must be protected, too.
    """
    declared = declared_releases(plan)
    parts = (plan.algorithm.client, tuple((r.mechanism, r.batches) for r in declared))
    first = {}
    classes = [first.setdefault(bits_of(x), len(first)) for x in jax.tree.leaves(parts)]
    name = (
        "client",
        shapes_key(parts),
        tuple(classes),
        tuple((r.count, r.steps) for r in declared),
        plan.algorithm.stateful,
        shapes_key((plan.task.init, plan.algorithm.init)),
        shapes_key(row_shapes(plan)),
        plan.fed.index.shape[-1],
        plan.sampler.clients,
        (shapes_key(plan.algorithm.personal),) if keeps else (),
    )
    return cached(name, lambda: trace_client(plan, declared, parts, classes, keeps))


def trace_client(plan, declared, parts, classes, keeps=False) -> Verdict:
    """Trace a client and return the verdict on it; the arguments are as in `judge_client`.

    Args:
        parts: the client, and the mechanism and batches of each declared release.
        classes: for each numeric leaf of `parts`, an index; equal numbers have the same index.
    """
    x, y = row_shapes(plan)
    slots = x.shape[0] if plan.fed.host is not None else plan.fed.index.shape[-1]
    leaves, structure = jax.tree.flatten(abstract(parts))
    structures = []

    def program(leaves, context, keys, server, client_state, rows):
        client, releases = structure.unflatten(leaves)
        context = context._replace(clients=plan.sampler.clients)
        x, y, index = rows
        rows = Rows(x, y, index, context.size)
        results = client(context, Keys(*keys), server, client_state, rows)
        payload, kept, _ = contract.client_results(plan.algorithm.name, results, client_state)
        if keeps:
            payload = payload, kept, plan.algorithm.personal(server, kept)
        releases = [(mech.at_round(m, context.round), b) for m, b in releases]
        structures[:] = [tuple(map(jax.tree.structure, r)) for r in releases]
        return payload, kept, [[jax.tree.leaves(part) for part in r] for r in releases]

    try:
        server, state = state_shapes(plan)
        keys, indices = [key_shape(), key_shape()], jax.ShapeDtypeStruct((slots,), jnp.int32)
        operands = (leaves, context_shapes(), keys, server, state, [x, y, indices])
        with marks.CHECKING(True):
            closed, shapes = jax.make_jaxpr(program, return_shape=True)(*operands)
        judge = Judge(plan, declared, keeps, shapes)
        return judge.verdict(closed, operands, classes, structures)
    except contract.ContractError:
        raise
    except Exception as error:  # an error of the user's algorithm
        why = (f"the client could not be followed: {checks.describe_error(error)}",)
        return Verdict(why, why, (), [], None)


class Judge:
    """Compares the result of `Flow` for one client with the declarations of its algorithm."""

    def __init__(self, plan, declared, keeps, shapes):
        self.plan, self.declared, self.shapes = plan, declared, shapes
        self.flow, self.example, self.client = Flow(), [], []
        # With `keeps`, the observer sees the payload, the new state and the personal model.
        seen = zip(shapes[0], ("payload", "own", "personal")) if keeps else [(shapes[0], "payload")]
        self.names = [path for tree, name in seen for path in _leaf_names(tree, name)]
        self.num_sent = len(self.names)
        self.names += _leaf_names(shapes[1], "own")
        self.verb = "sends or keeps" if keeps else "sends"

    def verdict(self, closed, operands, classes, structures) -> Verdict:
        """Interpret a traced client and return the verdict on it.

        Args:
            closed: the jaxpr of `program` in `trace_client`.
            operands: the shapes of its arguments.
            classes, structures: as in `trace_client`.
        """
        self.follow(closed, operands, classes, structures)
        self.find_tainted_state()
        self.judge_payload()
        self.judge_clients()
        releases = self.judge_releases()
        consts = [c for c in self.flow.consts.values() if not isinstance(c, jax.core.Tracer)]
        once = lambda findings: tuple(dict.fromkeys(findings))
        shapes = (operands[3], self.shapes[0])
        return Verdict(once(self.example), once(self.client), releases, consts, shapes)

    def follow(self, closed, operands, classes, structures):
        """Interpret the client, with a token for every input that is a source of data."""
        leaves, context, keys, server, state, rows = operands
        of_rows = ("rows.x", "rows.y", "rows.index")
        inputs = [
            *((("leaf", c), a) for c, a in zip(classes, leaves)),
            *zip(Context._fields, context),
            *zip(("keys.batch", "keys.noise"), keys),
            *((("server", i), a) for i, a in enumerate(jax.tree.leaves(server))),
            *((("own", i), a) for i, a in enumerate(jax.tree.leaves(state))),
            *zip(of_rows, rows),
        ]
        tokens = {name: [("rows", name)] for name in of_rows}
        tokens |= {name: [name, ("kept", name[1])] for name, _ in inputs if name[0] == "own"}
        tokens["keys.batch"] = [("draw", "keys.batch")]
        tokens["keys.noise"] = [("key", "keys.noise")]
        # With add_remove, neighbouring data sets differ in the number of rows.
        if any(r.mechanism.adjacency == "add_remove" for r in self.declared):
            tokens["size"] = [("size", "rows.size")]
        values = [self.flow.input(name, aval, *tokens.get(name, ())) for name, aval in inputs]
        self.inputs = {name: value.symbol for (name, _), value in zip(inputs, values)}
        outputs = self.flow.run(closed, values, Place())
        self.outputs, numbers = outputs[: len(self.names)], iter(outputs[len(self.names) :])
        self.sent, self.kept = self.outputs[: self.num_sent], self.outputs[self.num_sent :]
        # The mechanism and batches of each declared release: structures, and symbols for numbers.
        symbols = lambda part: tuple(next(numbers).symbol for _ in part)
        self.declared_symbols = [
            tuple((structure, symbols(part)) for structure, part in zip(pair, parts))
            for pair, parts in zip(structures, self.shapes[2])
        ]

    # --- what reaches the payload

    def find_tainted_state(self):
        """Find the parts of the client state that come to hold data, and the paths of the data."""
        self.state_paths = {}
        while True:
            new = {}
            for i, value in enumerate(self.kept):
                token = next(filter(self.is_source, value.tokens), None)
                if token is not None and i not in self.state_paths:
                    new[i] = self.describe_path(
                        token, value.tokens[token], self.names[self.num_sent + i]
                    )
            if not new:
                return
            self.state_paths |= new

    def is_source(self, token) -> bool:
        """Return whether a token stands for data that no release protects."""
        return token[0] in SOURCES and (token[0] != "kept" or token[1] in self.state_paths)

    def judge_payload(self):
        """Find data that reaches the payload without noise, and noise keys among the outputs."""
        paths = {}  # one path for each kind of source
        for name, value in zip(self.names, self.sent):
            for token in filter(self.is_source, value.tokens):
                detail = token[1] if token[0] in ("rows", "opaque", "draw") else ""
                paths.setdefault((token[0], detail), (token, value.tokens[token], name))
        for kind, detail in sorted(paths, key=lambda source: SOURCES.index(source[0])):
            what = {"size": SIZE, "draw": "which rows were drawn"}.get(kind, "rows")
            reach = "reaches" if kind in ("size", "draw") else "reach"
            end = "" if kind == "draw" else " without noise"
            words = f"{what} {reach} what the client {self.verb}{end}"
            # Rows that are sent reveal which rows were drawn.
            if kind != "draw" or all(other != "rows" for other, _ in paths):
                self.blame(self.example, words, *paths[kind, detail])
        avals = jax.tree.leaves(self.shapes[:2])
        for name, value, aval in zip(self.names, self.outputs, avals):
            if is_key(aval) and ("key", "keys.noise") in value.tokens:
                self.example.append(f"a noise key outlives its round: {name}")

    def judge_clients(self):
        """Find reads of rows that may belong to another client.

        Noise for whole clients does not protect such rows.
        """
        for name, value in zip(self.names, self.outputs):
            for token, path in value.tokens.items():
                if token[0] in ("rows", "opaque") and token[1] != "rows.index":
                    words = "rows are read other than by batches.gather, perhaps another client's"
                    self.blame(self.client, words, token, path, name)
        for mark in self.flow.marks.values():
            if mark.kind == "jfl_batch" and not self.read_batch(mark)[0]:
                self.client.append(
                    "rows are read that may be another client's: gather needs the rows that "
                    "the client received, with slots of batches.draw_slots or a mask of "
                    "slots < rows.size"
                )
        reads_state = any(t[0] == "own" for value in self.sent for t in value.tokens)
        if reads_state and not self.plan.algorithm.stateful:
            self.client.append("clients keep state, but stateful=True is not declared")

    # --- the releases

    def judge_releases(self) -> tuple:
        """Judge all releases that reach the payload, now or in a later round, and return them."""
        reached, todo, states = {}, list(self.sent), set()
        while todo:
            for kind, what in todo.pop().tokens:
                if kind == "released":
                    reached[what] = None
                elif kind == "own" and what not in states:
                    states.add(what)
                    todo.append(self.kept[what])
        self.sites = collections.defaultdict(list)
        for mark in self.flow.marks.values():
            if mark.kind == "jfl_release":
                self.sites[mark.site].append(mark)
        self.reached = reached
        # Of batches that count as sampled: address of the draw, scheme, index of the release.
        self.drawn_batches = []
        releases, counts = [], collections.Counter()
        for site in reached:
            descriptions = set()
            for mark in self.sites[site]:
                reads, declared = self.judge_release(mark)
                descriptions.add((self.describe_chain(mark), reads))
                counts[declared] += 1
            ((name, reads), *_) = sorted(descriptions)
            times = len(self.sites[site])
            releases.append(Released(name, times, self.describe_keys(site), reads))
        self.judge_counts(counts)
        self.judge_keys()
        self.judge_draws()
        return tuple(releases)

    def judge_counts(self, counts):
        """Check that each declared release occurs at most as often as declared.

        A declared release also counts for one of fewer steps.

        Args:
            counts: the number of releases in the trace, by the index of the declared release with
                the fewest steps that counts for them.
        """
        kinds = [(c, bool(r.steps)) for c, r in zip(self.declared_symbols, self.declared)]
        for i in sorted(counts.keys() - {None}):
            release = self.declared[i]
            same = [
                k
                for k, other in enumerate(self.declared)
                if kinds[k] == kinds[i] and other.steps >= release.steps
            ]
            times = sum(counts[k] for k in same)
            declared = sum(self.declared[k].count for k in same)
            if times > declared:
                of_steps = f" of {release.steps} steps or more" * (release.steps > 1)
                words = describe_chain(release.mechanism)
                self.example.append(f"{times} releases{of_steps}, {declared} declared: {words}")

    def mechanism_symbols(self, mark):
        """Return the mechanism of a mark: its structure, and symbols for its numbers."""
        skip = 2 * mark.params["n"] + 3 if mark.kind == "jfl_release" else mark.params["n"] + 1
        return mark.params["structure"], tuple(o.symbol for o in mark.operands[skip:])

    def describe_chain(self, mark) -> str:
        """Return the stage names of a mark's chain, if it is declared."""
        pairs = zip(self.declared, self.declared_symbols)
        words = [
            describe_chain(r.mechanism) for r, c in pairs if c[0] == self.mechanism_symbols(mark)
        ]
        return words[0] if words else "a chain that is not declared"

    def judge_release(self, mark):
        """Check one release of the traced client, and add what is wrong to the findings.

        Args:
            mark: the mark of the release in the trace.

        Returns:
            A phrase about the rows that the release reads, and the index of the release that the
            plan declares for it, the one with the fewest steps; None if it declares none.
        """
        n = mark.params["n"]
        where = f"a release of {self.describe_chain(mark)}"
        note = lambda finding: self.example.append(f"{where}: {finding}")
        _, weight, client = mark.operands[2 * n : 2 * n + 3]
        if any(key[0] != self.inputs["keys.noise"] for key in self.keys_of(mark)):
            note(
                "its noise key does not come from keys.noise, so it is the same in other rounds or "
                "clients"
            )
        if not _is_one(weight):
            note("a max_weight other than 1")
        if mark.params["each"] and client.symbol != self.inputs["client"]:
            note("the noise level of another client")
        name = self.flow.bounded_sum(mark)
        if name is None:
            words = "noise on a sum that no row stage of its chain bounds"
            found = [
                self.describe_path(t, path, "release")
                for t, path in self.sources_in(mark.operands[n : 2 * n])
            ]
            self.example.append(": ".join([words, *found[:1]]))
            return "rows", None
        bounded = self.flow.marks[name]
        if bounded.params["batch"] or mark.params["batch"]:
            note("a vmap of the client around it, which is not followed")
        is_single = bounded.params["kind"] == "single"
        kept = []
        if is_single:
            used, kept = self.batches_of_client(bounded, note)
        else:
            used = self.batch_of(bounded, note)
        if used is None:
            return "rows", None
        read = [self.read_batch(batch) for batch in used]
        if not all(is_own for is_own, _, _ in read):
            note("rows that may not be the client's own")
            return "rows", None
        numbers = self.mechanism_symbols(mark)
        is_same_chain = numbers == self.mechanism_symbols(bounded)
        alike = [
            i
            for i, (chain, _) in enumerate(self.declared_symbols)
            if is_same_chain and chain == numbers
        ]
        return self.find_declaration(where, alike, is_single, read, kept)

    def find_declaration(self, where, alike, is_single, read, kept):
        """Return what `judge_release` returns, and add a finding if no declared release counts.

        Args:
            where: describes the release.
            alike: the indices of the declared releases with its chain.
            is_single: whether the whole client makes one contribution.
            read: what `read_batch` found about each batch of the release.
            kept: as `batches_of_client` returns it.
        """
        for i in sorted(alike, key=lambda i: self.declared[i].steps):
            if self.is_counted(i, is_single, read, bool(kept)):
                release = self.declared[i]
                scheme = release.batches.scheme
                self.drawn_batches += [(address, scheme, i) for _, _, address in read]
                return describe_batches(release.batches, release.steps), i
        if any(self.is_counted(i, is_single, read, False) for i in alike):
            words = f"{where}: client state that depends on earlier rounds needs batches.full"
            token, path = kept[0]
            self.blame(self.example, words, token, path, "release")
            return "rows", None
        words = f"{where}: no declared release has this chain, this adjacency and these batches"
        releases = [self.declared[i] for i in alike]
        if is_single and any("poisson" in r.batches.scheme and not r.steps for r in releases):
            words += "; one contribution of Poisson batches needs jfl.Release(steps=their number)"
        self.example.append(words)
        return "rows", None

    def is_counted(self, i, is_single, read, remembers) -> bool:
        """Return whether the accounting of a declared release covers a release with its chain.

        Args:
            i: the index of the declared release.
            is_single: whether the whole client makes one contribution.
            read: what `read_batch` found about each batch of the release.
            remembers: whether the contribution depends on rows of earlier rounds.
        """
        release, batches = self.declared[i], self.declared_symbols[i][1]
        scheme = release.batches.scheme
        if is_single:
            # A sum moves by at most one clip norm if Poisson batches leave a row out, and one
            # contribution by two.  Only a release with steps counts two.
            two_norms = release.steps or scheme not in ("poisson", "truncated_poisson")
            if release.mechanism.adjacency != "replace_one" or not two_norms:
                return False
        elif release.steps:
            return False
        if scheme == "full" and (is_single or read[0][1] == "full"):
            return True
        is_sampled = all(drawn == batches for _, drawn, _ in read)
        # A row of an earlier round may be in none of the batches.
        return is_sampled and not remembers and len(read) <= max(release.steps, 1)

    def sources_in(self, operands) -> list:
        """Return the sources in operands, as pairs (token, path)."""
        return [(t, p) for o in operands for t, p in o.tokens.items() if self.is_source(t)]

    def blame(self, findings, words, token, path, end):
        """Add a finding about a path, or about the primitive on it that may hide anything."""
        words = f"what {token[1]} does" if token[0] == "opaque" else words
        findings.append(f"{words}: {self.describe_path(token, path, end)}")

    def batch_of(self, bounded, note):
        """Return the batch whose rows contribute separately to a sum, as a list of one mark.

        The result is None if the program does not show that rows contribute separately.

        Args:
            bounded: the mark of the sum.
            note: is called with a sentence about anything that the program does not show.
        """
        flow = self.flow
        kind, group, *_ = flow.nodes[bounded.operands[bounded.params["n"]].symbol]
        is_mark = kind == "mark" and flow.marks[group].kind == "jfl_example"
        for token, path in self.sources_in(bounded.operands):
            if not (is_mark and token == ("example", group)):
                words = "rows reach the gradient of another row"
                if token[0] == "size":
                    words = f"{SIZE} reaches the gradients of all rows"
                self.blame(self.example, words, token, path, "clipped sum")
        if not is_mark:
            note("contributions that may depend on several rows")
            return None
        read = [flow.nodes[o.symbol] for o in flow.marks[group].operands[:3]]
        batch = read[0][1]
        if read != [("mark", batch, i) for i in range(3)] or flow.marks[batch].kind != "jfl_batch":
            note("a batch that was changed, or not read by batches.gather")
            return None
        return [flow.marks[batch]]

    def batches_of_client(self, bounded, note) -> tuple[list, list]:
        """Return what a single contribution of the client depends on: batches, and client state.

        The contribution may depend on earlier releases.  Their batches and state count as well,
        unless these releases reach the payload themselves, so that they are counted already.

        Args:
            bounded: the mark of the sum, which has one contribution.
            note: as in `batch_of`.

        Returns:
            The marks of the batches, and pairs (token, path) of client state that holds rows.
        """
        if not _is_one(bounded.operands[bounded.params["n"]]):
            note("a contribution whose weight may not be 1")
        used, kept, seen, todo = [], [], set(), list(bounded.operands)
        while todo:
            for token, path in todo.pop().tokens.items():
                if token in seen:
                    continue
                seen.add(token)
                kind, what = token
                if kind in ("rows", "opaque"):
                    words = "rows are read other than by batches.gather"
                    self.blame(self.example, words, token, path, "release")
                elif kind == "batch":
                    used.append(what)
                elif kind == "kept" and self.is_source(token):
                    kept.append((token, path))
                elif kind in ("example", "bounded"):
                    todo += self.flow.marks[what].operands
                elif kind == "released" and what not in self.reached:
                    todo += [o for mark in self.sites[what] for o in mark.operands]
        return [self.flow.marks[name] for name in sorted(used)], kept

    # --- batches

    def read_batch(self, mark):
        """Return what the client's traced program shows about the rows of a batch.

        Args:
            mark: the equation with which `marks.example` marked the batch in the program.

        Returns:
            Whether the rows are known to be rows of the client; the batch sampler that drew them,
            in which symbols stand for its numbers, or "full"; and where the program draws them (see
            `judge_draws`).  The last two are None if they are not known.
        """
        unknown, flow = (False, None, None), self.flow
        x, y, index, size, slots, mask = (o.symbol for o in mark.operands[3:9])
        given = {"rows.x": x, "rows.y": y, "size": size}
        if self.plan.fed.host is None:
            given["rows.index"] = index
        if mark.params["batch"] or any(
            self.inputs[name] != symbol for name, symbol in given.items()
        ):
            return unknown
        slots_draw, mask_draw = self.find_draw(slots, 0), self.find_draw(mask, 1)
        if slots_draw is not None and slots_draw == mask_draw:
            name, i = slots_draw
            draw = flow.marks[name]
            dims = draw.params["batch"][0][1] if draw.params["batch"] else [-1] * 5
            key, step, size = draw.operands[2:5]
            if size.symbol != self.inputs["size"] or depends_on_data(key) or depends_on_data(step):
                return unknown
            at = lambda known, dim: int(known[i] if dim == 0 else known)
            step = f"#{step.symbol}" if step.known is None else at(step.known, dims[3])
            address = (*flow.keys[at(key.known, dims[2])], step)
            batches = draw.params["structure"], tuple(o.symbol for o in draw.operands[5:])
            return True, batches, address
        # All rows: a mask of slots below the client's size, where no slot occurs twice.
        test = flow.nodes[mask]
        if test[:2] == ("op", "lt") and test[3] == slots and self.are_distinct(mark.operands[7]):
            if self.unwrap(test[4]) == self.inputs["size"]:
                return True, "full", None
        return unknown

    def are_distinct(self, slots) -> bool:
        """Return whether no slot occurs twice."""
        if slots.known is not None:
            return np.unique(slots.known).size == slots.known.size
        return self.flow.nodes[slots.symbol][:2] == ("op", "iota")

    def find_draw(self, symbol, which):
        """Find the draw of a batch sampler that computed a value.

        The result is (mark of the draw, iteration of the loop), or None if there is no such draw.

        Args:
            symbol: the symbol of the value, which is slots or a mask.
            which: 0 for slots, 1 for a mask.
        """
        flow, node, i, dim = self.flow, self.flow.nodes[symbol], None, None
        if node[0] == "element":
            i, dim, node = node[2], 0, flow.nodes[node[1]]
            if node[:2] == ("op", "broadcast_in_dim"):  # a mask that all passes share
                dim, node = -1, flow.nodes[node[3]]
        if node[0] != "mark" or node[2] != which or flow.marks[node[1]].kind != "jfl_slots":
            return None
        batch = flow.marks[node[1]].params["batch"]
        whole = flow.shapes[flow.node(*node)][-1:]
        if flow.shapes[symbol] != whole or len(batch) > 1:
            return None
        dims = batch[0][1] if batch else (None,)
        if any(d not in (0, -1, None) for d in dims) or dim != (dims[which] if batch else None):
            return None
        return node[1], i

    def unwrap(self, symbol) -> int:
        """Return the symbol that a number had before its shape or dtype was changed."""
        node = self.flow.nodes[symbol]
        forms = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze")
        while node[0] == "op" and node[1] in forms:
            symbol = node[3]
            node = self.flow.nodes[symbol]
        return symbol

    def judge_draws(self):
        """Check that batches that count as independent samples are drawn independently.

        The address of a draw is its key, as a path from its root, followed by its step.
        """
        note = self.example.append
        used = [draw for draw in self.drawn_batches if draw[1] != "full" and draw[0] is not None]
        if any(address[0] != self.inputs["keys.batch"] for address, _, _ in used):
            note(
                "batches are not drawn from keys.batch, so they are the same in other rounds or "
                "clients"
            )
            return
        epochs = [(address[1:], i) for address, scheme, i in used if scheme == "epochs"]
        # Steps of clipped sums, which use a row once in each epoch; by the index of the release.
        steps_of = collections.defaultdict(set)
        for step, i in epochs:
            if not self.declared[i].steps:
                steps_of[i].add(step)
        first = lambda count: {(step,) for step in range(count)}
        if {step for step, _ in epochs} != first(len(epochs)):
            note("batches of epochs that are not taken step by step from 0")
        elif any(len(steps) > 1 and steps != first(len(steps)) for steps in steps_of.values()):
            # Steps that begin inside an epoch may use a row once more than the accountant counts.
            note("several batches of epochs for one release, which does not begin with step 0")
        elif first_overlap([address for address, _, _ in used]) is not None:
            note("batches that count as independent draws share one draw")

    # --- keys

    def keys_of(self, mark) -> list:
        """Return the noise keys of a release, as paths from their root."""
        known = mark.operands[2 * mark.params["n"]].known
        return [self.flow.keys[i] for i in np.unique(known)]

    def judge_keys(self):
        """Check that each release has a separate key, and that nothing else draws from it."""
        root, note = self.inputs["keys.noise"], self.example.append
        released = [
            (mark.site, key)
            for marks in self.sites.values()
            for mark in marks
            for key in self.keys_of(mark)
            if key[0] == root
        ]
        overlap = first_overlap([key for _, key in released])
        if overlap is not None:
            (site, one), (other_site, other) = (released[i] for i in overlap)
            if site == other_site:
                note(f"the iterations of a loop share one noise key: {self.describe_key(one)}")
            else:
                words = f"{self.describe_key(one)} and {self.describe_key(other)}"
                note(f"two releases share one noise key: {words}")
        sent = [key for site, key in released if site in self.reached]
        for operand, equation in self.flow.draws.values():
            if ("key", "keys.noise") not in operand.tokens:
                continue
            line = _user_line(equation)
            for key in (self.flow.keys[i] for i in np.unique(operand.known)):
                if any(self.may_be_ancestor(key, other) for other in sent):
                    note(
                        f"{equation.primitive.name} reads the noise key of a release, "
                        f"{self.describe_key(key)}" + (f" ({line})" if line else "")
                    )

    def may_be_ancestor(self, key, other) -> bool:
        """Return whether a key may be equal to another key, or one from which the other is derived.

        A key of unknown origin, such as one that depends on data, may be any key.
        """
        is_unknown = key[0] != self.inputs["keys.noise"]
        return is_unknown or len(key) <= len(other) and may_be_equal(key, other)

    # --- words

    def describe_path(self, token, path, name) -> str:
        """Return a path as text: its source, the steps worth showing, and its end."""
        kind, source = token
        steps, line = [], ""
        while path is not None:
            path, equation = path
            primitive = equation.primitive.name
            line = line or _user_line(equation)
            is_shown = primitive not in STEPS_NOT_SHOWN and not primitive.startswith("jfl_")
            if is_shown and primitive not in steps[-1:] and (kind, primitive) != token:
                steps.append(primitive)
        steps.reverse()
        if len(steps) > MAX_STEPS_SHOWN:
            steps = [*steps[:2], "...", *steps[3 - MAX_STEPS_SHOWN :]]
        begin = source
        if kind in ("batch", "example", "bounded"):
            begin = "rows"
        if kind == "kept":
            begin = self.state_paths[source].split(" (")[0]
        return " -> ".join([begin, *steps, name]) + (f" ({line})" if line else "")

    def describe_keys(self, site) -> str:
        """Return the noise keys of a release as text: the first and, if there are several, the
        last."""
        keys = [self.describe_key(key) for mark in self.sites[site] for key in self.keys_of(mark)]
        return keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"

    def describe_key(self, key) -> str:
        """Return the expression with which a user would write a key."""
        names = {symbol: name for name, symbol in self.inputs.items() if isinstance(name, str)}
        text = names.get(key[0], "a key that is not the client's")
        for step in key[1:]:
            text = f"fold_in({text}, {step if isinstance(step, int) else 'a number'})"
        return text


def depends_on_data(value) -> bool:
    """Return whether a value may depend on the client's data (other than through random draws)."""
    return any(token[0] in SOURCES and token[0] != "draw" for token in value.tokens)


def _leaf_names(tree, name) -> list:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [name + jax.tree_util.keystr(path) for path, _ in leaves]


def _is_one(value) -> bool:
    return value.known is not None and bool(np.all(value.known == 1.0))


# The folders of code that is not the user's: Python, kernels, jfl and libraries.
_FILES = (
    os.__file__,
    normals.__file__,
    *(os.path.dirname(str(m.__file__)) for m in (checks, jax, np)),
)
NOT_USERS = ("<frozen", *(os.path.dirname(os.path.abspath(str(name))) for name in _FILES))


def _user_line(equation) -> str:
    """Return the line of the user's code that made an equation, such as "client, mine.py:12", or
    "" if jfl or a library made it."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        if frame.file_name == __file__:  # the frames after it are of whoever asked
            return ""
        if not frame.file_name.startswith(NOT_USERS):
            function = frame.function_name.rsplit(".", 1)[-1]
            return f"{function}, {os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""
