"""Fields of a config that were set and change nothing."""

from ..core import checks
from .config import Config, FIELDS


def refuse_idle(*configs: Config):
    """Refuse a field that was set and changes nothing in any of these: a flag that is ignored looks
    like a result."""
    idle = [_idle(c) for c in configs]
    for field in idle[0]:
        if all(field in i for i in idle):
            checks.fail(
                "config",
                f"{idle[0][field]} for {field}",
                f"{field}={getattr(configs[0], field)!r} without it",
                f"Leave {field} out.",
            )


def _idle(config: Config) -> dict:
    """Fields that are not their default and have no effect -> what they need for one."""
    noise = config.noise_multiplier is not None or config.epsilon is not None
    local = config.algorithm != "fedsgd"
    adaptive = config.algorithm == "addpnfl"
    trained = local and config.algorithm not in ("output_perturbation", "padpfl")
    shaped = config.noise_shape != "isotropic"
    published, grouped = config.noise_shape == "published", bool(config.group_rows)
    table = (
        ("mu", "algorithm 'fedprox' or 'padpfl'", config.algorithm in ("fedprox", "padpfl")),
        ("upload", "algorithm='padpfl'", config.algorithm == "padpfl"),
        (
            "groups",
            "group_rows, group_noise or impact",
            bool(config.group_rows + config.group_noise + config.impact),
        ),
        ("noise_shape", "noise_multiplier or epsilon", noise),
        ("bands", "a noise_shape", shaped),
        ("band_exponent", "noise_shape='ellipsoid'", config.noise_shape == "ellipsoid"),
        *((f, "noise_shape='published'", published) for f in ("reading", "lemma2")),
        ("weights", "no impact", not config.impact),
        ("warm_rounds", "algorithm='scaffold'", config.algorithm == "scaffold"),
        *(
            (f, "algorithm='addpnfl'", adaptive)
            for f in ("adaptivity", "beta1", "beta2", "second_moment_of")
        ),
        ("server_optimizer", "an algorithm other than 'addpnfl'", not adaptive),
        ("paper", "mode='as_printed'", config.mode == "as_printed"),
        ("mode", "noise_multiplier or epsilon", noise),
        (
            "per_client_noise",
            "epsilon, unit='example' and mode='sound'",
            config.epsilon is not None
            and config.mode == "sound"
            and config.unit in (None, "example"),
        ),
        *((f, "noise_multiplier or epsilon", noise) for f in ("clip_decay", "noise_decay")),
        ("latency_spread", "sampler='first_responders'", config.sampler == "first_responders"),
        ("steps", "an algorithm with local steps", local),
        ("optimizer", "an algorithm with local steps", trained),
        ("server_lr", "an algorithm with local steps (fedsgd: lr is the server's)", local),
        (
            "alpha",
            "partition='dirichlet' and no group_rows",
            config.partition == "dirichlet" and not grouped,
        ),
        *(
            (f, "dataset='synthetic'", config.dataset == "synthetic")
            for f in ("synthetic_alpha", "synthetic_beta")
        ),
        (
            "classes_per_client",
            "partition 'shards' or 'labels'",
            config.partition in ("shards", "labels"),
        ),
        ("share", "partition='similarity'", config.partition == "similarity"),
        (
            "rows_per_client",
            "partition 'labels' or 'similarity', or dataset='synthetic', and no group_rows",
            (config.partition in ("labels", "similarity") or config.dataset == "synthetic")
            and not grouped,
        ),
        (
            "exponent",
            "partition 'power_law' or 'labels', and no group_rows",
            config.partition in ("power_law", "labels") and not grouped,
        ),
        (
            "min_rows",
            "partition 'dirichlet', 'power_law' or 'labels', and no group_rows",
            config.partition in ("dirichlet", "power_law", "labels") and not grouped,
        ),
        ("hidden", "model='mlp'", config.model == "mlp"),
        ("batch", "a batch_sampler other than 'full'", config.batch_sampler != "full"),
        (
            "clip_norm",
            "noise_multiplier or epsilon",
            noise or config.algorithm == "output_perturbation",
        ),
        *(
            (f, "noise_multiplier or epsilon", noise)
            for f in ("clip", "delta", "view", "adjacency")
        ),
        (
            "allow_empty",
            "sampler='poisson'",
            config.sampler == "poisson" or config.rate is not None,
        ),
    )
    return {
        f: need for f, need, holds in table if not holds and getattr(config, f) != FIELDS[f].default
    }
