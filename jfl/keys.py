"""Named random streams: a draw is addressed by (seed, round, stream, client, step), never threaded.

So slot order, capacity, chunk size, evaluation and resume cannot change a draw.  Noise keys also fold in a digest of
what runs, so that two points of a sweep that share a seed share cohorts and batches but never noise: their difference
would be free of it.
"""
import enum
import functools
import hashlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np


class Stream(enum.IntEnum):
    """Append, never renumber: a number is part of every recorded result."""
    INIT = 0
    COHORT = 1
    BATCH = 2
    ROWS = 3          # noise of local steps
    UPLOAD = 4        # noise of a client's upload
    RELEASE = 5       # noise of the server's release
    AGAIN = 6         # cohorts and batches of a later attempt


def stream(key, name: Stream, round_):
    return jax.random.fold_in(jax.random.fold_in(key, name), round_)


def streams(key, names, round_):
    """One key of each stream, [len(names)]; together, since on a CPU a generator costs by the call, not by the key."""
    return jax.vmap(lambda name: stream(key, name, round_))(jnp.array(names, jnp.int32))


def noise_base(key, digest, attempt):
    """The key all noise of a run descends from; `digest` UInt32[2]."""
    for word in (digest[0], digest[1], attempt):
        key = jax.random.fold_in(key, word)
    return key


# A class that moved keeps the name it had, so that recorded results can be computed again.
MOVED = {"jfl.gradients.Grad": "jfl.local.Grad"}

# --- digest: what runs, as 64 bits ------------------------------------------------------------------------------

def structure(value, seen=(), held=False) -> str:
    """A text that names the static part of `value` alike in every process: no addresses, no ids.

    Of arrays it is the shape, as their numbers are leaves; those `held` by a function are none: of them it has a digest.
    """
    inner = functools.partial(structure, held=held)
    if isinstance(value, (str, int, float, bool, complex, bytes, type(None), type(...), enum.Enum)):
        return repr(value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        if held and not isinstance(value, jax.core.Tracer):
            plain = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
            return hashlib.sha256(np.asarray(plain).tobytes()).hexdigest()[:16]
        return f"array{tuple(value.shape)}{value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({','.join(inner(v, seen) for v in value)})"
    if isinstance(value, (set, frozenset)):           # their order differs from process to process
        return f"{type(value).__name__}({','.join(sorted(inner(v, seen) for v in value))})"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{inner(v, seen)}" for k, v in sorted(value.items(), key=str)) + "}"
    if id(value) in seen:
        return "..."
    seen = seen + (id(value),)
    if hasattr(value, "__wrapped__"):                 # jax.jit and other decorators
        return f"{type(value).__name__}({inner(value.__wrapped__, seen)})"
    if hasattr(value, "__self__") and hasattr(value, "__func__"):      # a bound method
        return f"method({inner(value.__self__, seen)},{inner(value.__func__, seen)})"
    if hasattr(value, "__code__"):                    # a function: its code and what it closes over
        within = [_cell(c, seen) for c in value.__closure__ or ()]
        within += [structure(value.__defaults__, seen, True), structure(value.__kwdefaults__, seen, True)]
        return f"{value.__module__}.{value.__qualname__}:{_code(value.__code__)}({','.join(within)})"
    if hasattr(value, "tree_flatten"):                # Fn
        children, aux = value.tree_flatten()
        return f"{type(value).__name__}({inner(children, seen)},{inner(aux, seen)})"
    if hasattr(value, "func") and hasattr(value, "keywords"):          # functools.partial; JAX's own has leaves
        held = held or not isinstance(value, jax.tree_util.Partial)
        return f"partial({inner(value.func, seen)},{structure(value.args, seen, held)},{structure(value.keywords, seen, held)})"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    slots = [n for c in type(value).__mro__ for n in vars(c).get("__slots__", ()) if hasattr(value, n)]
    fields = {n: getattr(value, n) for n in slots} | getattr(value, "__dict__", {})
    fields = {k: v for k, v in fields.items() if not k.startswith("_")}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{MOVED.get(name, name)}{inner(fields, seen)}"


def _code(code) -> str:
    """A digest of a function's code and of the functions inside it."""
    consts = [_code(c) if hasattr(c, "co_code") else structure(c) for c in code.co_consts]
    return hashlib.sha256(repr((code.co_code, consts, code.co_names)).encode()).hexdigest()[:16]


def _cell(cell, seen):
    try:
        content = cell.cell_contents
    except ValueError:
        return "empty"
    return structure(content, seen, True)


def words(text: str) -> np.ndarray:
    """UInt32[2] of a text."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint32)


def mix(x):
    """A bijective scrambling of uint32 (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def bits(x, mask=None):
    """UInt32[2] digest of an array's bits and places.  A sum modulo 2^32, so it does not depend on order of work."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if mask is not None or x.size <= BLOCK:
        return placed(x, 0, mask)
    rows = max(1, BLOCK * x.shape[0] // x.size)       # large arrays by blocks of rows: nothing of their size is written
    whole = x.shape[0] // rows
    some = lambda i, total: total + placed(jax.lax.dynamic_slice_in_dim(x, i * rows, rows), i * rows)
    return jax.lax.fori_loop(0, whole, some, placed(x[whole * rows:], np.uint32(whole * rows)))


def together(arrays):
    """bits of each array, small ones of one shape at once: a plan holds dozens, and a program all of their arithmetic."""
    out, alike = [None] * len(arrays), {}
    for i, x in enumerate(map(jnp.asarray, arrays)):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.size > SMALL:
            out[i] = bits(x)
        else:
            alike.setdefault((x.shape, jax.typeof(x).sharding), []).append((i, _raw(x)))
    for members in alike.values():
        at, raw = zip(*members)
        for i, found in zip(at, jax.vmap(lambda x: placed(x, 0))(jnp.stack(raw))):
            out[i] = found
    return out


def _raw(x):
    x = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


@jax.jit                 # traced once for each shape
def placed(x, first, mask=None):
    """bits of a block of rows that begins at row `first`: the digest of an array is the sum of its blocks'."""
    raw = _raw(x)
    place = jnp.zeros(raw.shape, jnp.uint32)
    for axis in range(raw.ndim):                      # places by coordinates: padding an axis moves nothing
        place = mix(place + jax.lax.broadcasted_iota(jnp.uint32, raw.shape, axis)
                    + jnp.uint32(first if axis == 0 else 0) + jnp.uint32(0x9E3779B9 + axis))
    out = []
    for salt in (0x2545F491, 0x1B873593):
        h = mix(mix(raw + jnp.uint32(salt)) ^ place)
        out.append(jnp.sum(h if mask is None else jnp.where(mask, h, 0), dtype=jnp.uint32))
    return jnp.stack(out)


BLOCK = 2 ** 18
SMALL = 2 ** 10          # numbers of an array that is copied beside others
_bits = jax.jit(bits)
_owned: dict = {}        # id of an array -> a weak reference to it, its digest once it is known


def own(x):
    """Say that nobody else holds the memory of the jax array `x`, so that its digest may be kept: `x`.

    An array that shares memory with numpy (device_put, dlpack) may change under jax; such a one is never owned, and
    who writes through a dlpack view of an owned one breaks jax's own rule.
    """
    reference = weakref.ref(x)
    _owned[id(x)] = [reference, None]
    weakref.finalize(x, lambda name: _owned.pop(name) if _owned.get(name, (None,))[0] is reference else None, id(x))
    return x


def bits_once(x):
    """bits(x), kept for as long as the array lives where it is owned."""
    known = _owned.get(id(x))
    if known is None or known[0]() is not x:
        return bits(x) if isinstance(x, jax.core.Tracer) else _number(x)
    known[1] = _number(x) if known[1] is None else known[1]
    return known[1]


def _number(x):
    with jax.ensure_compile_time_eval():                  # also inside a trace that only closes over x
        return np.asarray(_bits(x))


@jax.jit
def fold(digests):
    """Digests UInt32[n, 2] in order, as one."""
    step = lambda total, d: (mix(total * jnp.uint32(0x01000193) + d + jnp.uint32(0x9E3779B9)), None)
    return jax.lax.scan(step, 0 * digests[0], digests)[0]        # under shard_map a sum varies as what is added
