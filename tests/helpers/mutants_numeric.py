"""Breaks of what is computed: draws, clips, noise, sums, accountants, and the ledger's events."""

from helpers.mutants import Mutant

KERNELS, PRIVACY = "tests/kernels", "tests/privacy"
NOISE, GHOST = f"{KERNELS}/test_noise.py", "tests/gradients/test_ghost_clipping.py"
ACCOUNTING, GUARANTEE = f"{PRIVACY}/test_accounting.py", f"{PRIVACY}/test_guarantee.py"
SAMPLERS, SEGMENTS = "tests/sampling/test_samplers.py", f"{PRIVACY}/test_segments.py"
MECHANISM, FLOATS = f"{PRIVACY}/test_mechanism.py", f"{PRIVACY}/test_floats.py"
BUDGET = f"{PRIVACY}/test_budget.py"
PLD, IDENTITY = f"{PRIVACY}/test_pld.py", "tests/core/test_identity.py"

AUDIT = "tests/auditing/test_audit.py"
DISTRIBUTION = "tests/auditing/test_distribution.py"
OF_CLIENTS = f"{DISTRIBUTION}::test_noise_of_clients_and_of_cohorts"

MUTANTS = (
    # --- draws of noise
    Mutant(
        "kernels/normals.py",
        "philox.draw(words, (position >> np.uint32(1)) + first)",
        "philox.draw(words, position >> np.uint32(1))",
        f"{NOISE}::test_leaves_by_themselves_are_those_that_are_stored",
    ),
    Mutant(
        "kernels/normals.py",
        "_flip(radius * (cos + sin), w3 << np.uint32(1))\n\n",
        "_flip(radius * (cos + sin), w3)\n\n",
        f"{NOISE}::test_every_word_gives_a_finite_normal_close_to_the_exact_one",
    ),
    Mutant(
        "kernels/philox.py",
        "(low_a * high_b + (middle & lower) >> half)",
        "(low_a * high_b >> half)",
        f"{NOISE}::test_known_answers_by_every_product",
    ),
    Mutant(
        "jfl/privacy/mechanisms/haar_bands.py",
        'one_per_band("bands.noise", bands, stds), draw(key, drawn)',
        'one_per_band("bands.noise", bands, stds) ** 2, draw(key, drawn)',
        f"{KERNELS}/test_haar.py::test_covariance_of_the_noise",
    ),
    Mutant(
        "jfl/local/training.py",
        "slots = draw_slots(work.batches, keys.batch, number, rows.size, num_slots)",
        "slots = draw_slots(work.batches, keys.batch, 0, rows.size, num_slots)",
        "tests/verify/test_verify.py::test_what_users_write_passes",
    ),
    # --- clipped sums
    Mutant(
        "jfl/gradients/ghost.py",
        "if equation.invars[side].aval.size != aval.size:",
        "if False:",
        f"{GHOST}::test_without_a_rule",
    ),
    Mutant(
        "jfl/gradients/ghost.py",
        "if len(rule) > 1 or not all(one.is_by_rows for one in rule.values()):",
        "if False:",
        f"{GHOST}::test_clips_by_bands",
    ),
    Mutant(
        "kernels/ghost_sums.py",
        "factor = jnp.minimum(1.0, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))",
        "factor = bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)",
        f"{GHOST}::test_equal_to_vmap",
    ),
    Mutant(
        "kernels/ghost_sums.py",
        "factor.reshape(factor.shape + (1,) * (x.ndim - 1)) != 0, x, jnp.zeros((), x.dtype)",
        "factor.reshape(factor.shape + (1,) * (x.ndim - 1)) < 1e9, x, jnp.zeros((), x.dtype)",
        f"{GHOST}::test_a_gradient_that_is_not_finite_counts_as_zero",
    ),
    Mutant(
        "kernels/ghost_sums.py",
        "return jnp.where(first, jnp.square(longest), 0).sum(1)",
        "return jnp.square(longest).sum(1)",
        f"{GHOST}::test_lookups_against_formed_gradients",
    ),
    Mutant(
        "kernels/ghost_sums.py",
        'jnp.einsum("nepi,nepo->eio", a, b, precision=FULL)',
        'jnp.einsum("nepi,nepo->eio", a, _at_least_float32(self.b), precision=FULL)',
        f"{GHOST}::test_products_against_formed_gradients",
    ),
    Mutant(
        "jfl/privacy/mechanisms/stages.py",
        "factor = jnp.minimum(1.0, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))",
        "factor = bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)",
        f"{MECHANISM}::test_small_contributions_are_left_alone_and_zero_is_not_divided_by",
    ),
    Mutant(
        "jfl/privacy/mechanisms/chain.py",
        "is_used, nonfinite = is_present & finite, is_present & ~finite",
        "is_used, nonfinite = is_present, is_present & ~finite",
        f"{FLOATS}::test_a_row_that_is_not_finite_counts_as_zero",
    ),
    Mutant(
        "jfl/privacy/mechanisms/chain.py",
        "dtypes, rows = pytrees.dtypes_of(rows), pytrees.at_least_float32(rows)",
        "dtypes = pytrees.dtypes_of(rows)",
        f"{FLOATS}::test_the_sum_is_that_of_a_loop",
        slow=True,
    ),
    Mutant(
        "jfl/engine/round.py",
        "return pytrees.add(sums, chunk_sums), new_states",
        "return chunk_sums, new_states",
        f"{FLOATS}::test_cohorts_of_half_precision_add_up_in_chunks",
        slow=True,
    ),
    # --- sensitivity
    Mutant(
        "jfl/privacy/mechanisms/chain.py",
        '(2.0 if mechanism.adjacency == "replace_one" else 1.0)',
        "1.0",
        f"{MECHANISM}::test_noise_has_the_scale_of_the_sensitivity",
    ),
    Mutant(
        "jfl/privacy/mechanisms/chain.py",
        "* bound(mechanism, state, shape(mechanism))\n        * max_weight\n",
        "* bound(mechanism, state, shape(mechanism))\n",
        f"{MECHANISM}::test_noise_has_the_scale_of_the_sensitivity",
    ),
    Mutant(
        "jfl/privacy/mechanisms/stages.py",
        "return jnp.maximum(state, floor) * jnp.sqrt(1 + jnp.square(indicator) / 4)",
        "return jnp.maximum(state, floor)",
        f"{MECHANISM}::test_noise_has_the_scale_of_the_sensitivity",
    ),
    Mutant(
        "jfl/privacy/mechanisms/stages.py",
        "return 1.0 if shape is None else jnp.max(shape.scales)",
        "return 1.0 if shape is None else jnp.min(shape.scales)",
        f"{PRIVACY}/test_wavelet.py::test_no_clipped_row_is_longer_than_its_bound",
    ),
    # --- accountants
    Mutant(
        "jfl/privacy/accountants/rdp.py",
        "u = q * xp.expm1((2 * x - 1) / (2 * z**2))",
        "u = q**2 * xp.expm1((2 * x - 1) / (2 * z**2))",
        f"{ACCOUNTING}::test_golden_file",
    ),
    Mutant(
        "jfl/privacy/accountants/rdp.py",
        "curve = xp.logaddexp(2 * xp.log(q) + log_moment, 0.0)",
        "curve = xp.logaddexp(3 * xp.log(q) + log_moment, 0.0)",
        f"{ACCOUNTING}::test_golden_file",
    ),
    Mutant(
        "jfl/privacy/accountants/rdp.py",
        "epsilon = curve + xp.log1p(-1 / orders)",
        "epsilon = curve + 2 * xp.log1p(-1 / orders)",
        f"{ACCOUNTING}::test_golden_file",
    ),
    Mutant(
        "jfl/privacy/accountants/tightest.py",
        "    return float(high)\n",
        "    return float(low)\n",
        f"{ACCOUNTING}::test_solved_noise_is_safe_and_tight",
    ),
    Mutant(
        "jfl/privacy/accountants/tightest.py",
        "if low >= 10**12 or not fits(low + 1):",
        "if low < 10**12:",
        f"{ACCOUNTING}::test_rounds_for_an_epsilon",
        slow=True,
    ),
    Mutant(
        "jfl/privacy/accountants/pld_step.py",
        "return mass.at[0].add(below[0]), lost[0]",
        "return mass.at[0].add(below[0]), 0.0 * lost[0]",
        f"{PLD}::test_nothing_vanishes_at_the_ends_of_a_grid",
        slow=True,
    ),
    Mutant(
        "jfl/privacy/accountants/pld_step.py",
        "offset = jnp.clip(loss - interval * (start + jnp.arange(size)), -",
        "offset = jnp.clip(interval * (start + jnp.arange(size)) - loss, -",
        f"{PLD}::test_masses_keep_both_probabilities_and_the_profile",
        slow=True,
    ),
    Mutant(
        "jfl/privacy/accountants/pld_step.py",
        "return composed.extra + jnp.sum(\n",
        "return 0.0 * composed.extra + jnp.sum(\n",
        f"{PLD}::test_any_window_is_an_upper_bound",
    ),
    Mutant(
        "jfl/privacy/accountants/pairs.py",
        "return up, down, up.weights[0] * inside",
        "return up, down, inside",
        f"{PRIVACY}/test_with_replacement.py::test_the_profile_is_the_worst_of_all_mixtures",
        slow=True,
    ),
    Mutant(
        "jfl/privacy/accountants/allocation.py",
        "upper = np.clip(np.expm1(height - cell * fine) / math.expm1(fine), 0.0, 1.0)",
        "upper = np.zeros(size)",
        f"{PRIVACY}/test_allocation.py::test_any_grid_is_an_upper_bound",
    ),
    Mutant(
        "jfl/privacy/accountants/allocation.py",
        "at_infinity=ratio.at_infinity + outside(present)",
        "at_infinity=ratio.at_infinity",
        f"{PRIVACY}/test_allocation.py::test_any_grid_is_an_upper_bound",
    ),
    # --- the ledger
    Mutant(
        "jfl/privacy/ledger/entry.py",
        "noise = np.sort(np.repeat(noise, entry.turns))[:times]",
        "noise = np.sort(np.repeat(noise, entry.turns))[-times:]",
        f"{GUARANTEE}::test_changing_noise_in_every_place",
    ),
    Mutant(
        "jfl/privacy/budget.py",
        "True, key=lambda n: after(n) is None)",
        "True, key=lambda n: after(n - 1) is None)",
        f"{BUDGET}::test_gaussians_spend_mu_squared",
    ),
    Mutant(  # the best order of the next plan
        "jfl/privacy/budget.py",
        "return dataclasses.replace(\n            self,\n",
        "return dataclasses.replace(\n            budget(plan, epsilon=self.epsilon),\n",
        f"{BUDGET}::test_the_order_does_not_follow_later_plans",
    ),
    Mutant(
        "jfl/privacy/budget.py",
        "first=self.rounds)",
        "first=0)",
        f"{BUDGET}::test_rounds_of_a_schedule_continue_where_they_ended",
    ),
    Mutant(
        "jfl/privacy/budget.py",
        "+ float(missed + overflow * n)",
        "+ float(missed)",
        f"{BUDGET}::test_overflows_and_the_range_of_noise_are_paid_by_a_share_of_delta",
    ),
    Mutant(
        "jfl/privacy/ledger/segments.py",
        "release=later(plan.release, first),",
        "release=plan.release,",
        f"{GUARANTEE}::test_a_later_segment_says_where_its_rounds_begin",
    ),
    Mutant(
        "jfl/privacy/ledger/segments.py",
        "if one.seed == other.seed and one.first < other.end and other.first < one.end:",
        "if False:",
        f"{SEGMENTS}::test_runs_of_one_seed_do_not_share_rounds",
    ),
    Mutant(
        "jfl/privacy/ledger/segments.py",
        "(SHARED,) if any(len(several) > 1 for several in of.values())",
        "(SHARED,) if any(len(several) > 2 for several in of.values())",
        f"{SEGMENTS}::test_a_sweep_says_what_its_points_share",
        slow=True,
    ),
    Mutant(
        "jfl/verify/client.py",
        "if overlap is not None:",
        "if False:",
        "tests/verify/test_verify.py::test_mutants_are_caught",
    ),
    # --- who takes part, and which rows
    Mutant(
        "jfl/sampling/uniform.py",
        "is_taken = jnp.any((chosen == draws[i]) & (jnp.arange(count) < i))",
        "is_taken = jnp.zeros((), bool)",
        f"{SAMPLERS}::test_batches_without_replacement_are_uniform_over_subsets",
    ),
    Mutant(
        "jfl/sampling/batches.py",
        "jax.random.bits(jax.random.fold_in(key, step), (n,), jnp.uint32), rate",
        "jax.random.bits(key, (n,), jnp.uint32), rate",
        f"{SAMPLERS}::test_draws_never_depend_on_padding",
    ),
    Mutant(
        "jfl/sampling/batches.py",
        "score = jax.random.uniform(jax.random.fold_in(key, step // per_epoch), (n,), jnp.float32)",
        "score = jax.random.uniform(jax.random.fold_in(key, step), (n,), jnp.float32)",
        f"{SAMPLERS}::test_epochs_cover_each_row_once",
    ),
    Mutant(
        "jfl/sampling/clients.py",
        "jax.lax.sort((times, words, ids), num_keys=2)",
        "jax.lax.sort((times, ids, ids), num_keys=2)",
        f"{SAMPLERS}::test_equal_latencies_are_a_uniform_cohort",
        slow=True,
    ),
    # --- identities, and models
    Mutant(
        "jfl/engine/round.py",
        "has_changed = (run.round > 0) & (run.plan_identity != plan_identity).any()",
        "has_changed = (run.round < 0) & (run.plan_identity != plan_identity).any()",
        f"{IDENTITY}::test_histories",
    ),
    Mutant(
        "jfl/engine/sweep.py",
        "if first_program != number:",
        "if False:",
        f"{IDENTITY}::test_points_that_would_be_compiled_apart_are_refused",
        slow=True,
    ),
    Mutant(
        "jfl/core/identity.py",
        'return {"list": found} if isinstance(value, list) else found',
        "return found",
        f"{IDENTITY}::test_values_of_different_types_are_distinguished",
    ),
    Mutant(
        "jfl/core/identity.py",
        'if code.co_name != "<lambda>":',
        "if True:",
        f"{IDENTITY}::test_a_lambda_counts_with_all_its_lines",
    ),
    Mutant(
        "jfl/core/identity.py",
        "if _origin(other) != _origin(value):",
        "if False:",
        f"{IDENTITY}::test_two_functions_of_one_name_are_rejected",
    ),
    Mutant(
        "jfl/models/targets.py",
        "is_label = jnp.arange(classes) == jnp.where(label < 0, label + classes, label)",
        "is_label = jnp.arange(classes) == label",
        "tests/models/test_models.py::test_a_label_that_is_none_is_alike_everywhere",
    ),
    # --- audits
    Mutant(
        "jfl/auditing/scores.py",
        "[side[first:] for side in seen])",
        "[side[:first] for side in seen])",
        f"{AUDIT}::test_the_bound_holds_as_often_as_it_says",
        slow=True,
    ),
    Mutant(
        "jfl/auditing/canaries.py",
        'others = -1.0 if entry.adjacency != "add_remove" and drawn and not release.steps else 0.0',
        "others = 0.0",
        f"{AUDIT}::test_no_more_than_is_proved_and_not_much_less",
    ),
    Mutant(
        "jfl/auditing/canaries.py",
        "if distance > farthest:",
        "if best is None or distance < farthest:",
        f"{AUDIT}::test_a_canary_is_as_long_as_the_bound_and_found_by_its_projection",
    ),
    Mutant(
        "jfl/auditing/scores.py",
        "np.square(moved) / 2, axis=1)",
        "np.square(moved), axis=1)",
        f"{AUDIT}::test_the_ratio_is_that_of_the_mixture",
    ),
    # --- what audits and the noise test must see
    Mutant(  # noise without the clip factor
        "jfl/privacy/mechanisms/chain.py",
        "level if stage.absolute else level * sensitivity(mechanism, state, max_weight),",
        "level,",
        OF_CLIENTS,
        slow=True,
    ),
    Mutant(  # noise divided twice
        "jfl/privacy/mechanisms/chain.py",
        "        after = after._replace(std=std, shape=stage.shape)",
        "        for post in _stages_with_role(mechanism, 'post'):\n"
        "            sigma = post.apply(sigma, after)[0]\n"
        "        after = after._replace(std=std, shape=stage.shape)",
        OF_CLIENTS,
        slow=True,
    ),
    Mutant(  # a cohort normalised by those who came, in place of those expected
        "jfl/privacy/mechanisms/stages.py",
        "value = pytrees.map(lambda x: x / jnp.asarray(n, x.dtype), value)",
        "n = n if after.realised is None else jnp.maximum(after.realised, 1)\n"
        "    value = pytrees.map(lambda x: x / jnp.asarray(n, x.dtype), value)",
        OF_CLIENTS,
        slow=True,
    ),
    Mutant(  # one key for all clients
        "jfl/engine/round.py",
        "client_key = lambda key: jax.random.fold_in(jax.random.fold_in(key, client_id), "
        "repeat_index)",
        "client_key = lambda key: jax.random.fold_in(key, repeat_index)",
        OF_CLIENTS,
        slow=True,
    ),
    Mutant(  # a sigma that is wrong under a mesh
        "jfl/engine/round.py",
        "max_weight=plan.weights.max(),",
        "max_weight=plan.weights.max() / sharding.num_devices(plan.mesh),",
        "tests/auditing/test_audit_devices.py::test_the_program_of_a_mesh_is_what_is_audited",
        slow=True,
    ),
    Mutant(  # a control variate that leaks without noise
        "jfl/algorithms/scaffold.py",
        "    payload = Payload(\n",
        "    bare = work.grad.mechanism\n"
        "    bare = type(bare)(\n"
        "        tuple(s for s in bare.stages if s.role != 'noise'), bare.adjacency\n"
        "    )\n"
        "    import dataclasses\n"
        "    bare = dataclasses.replace(work.grad, mechanism=bare)\n"
        "    bare = dataclasses.replace(work, grad=bare)\n"
        "    new_control = local.train(\n"
        "        bare, context, keys, server.params, rows, lambda g, w, s: pytrees.add(g, drift)\n"
        "    )[1]\n"
        "    payload = Payload(\n",
        f"{AUDIT}::test_scaffold_sends_nothing_beside_its_noise",
        slow=True,
    ),
)
