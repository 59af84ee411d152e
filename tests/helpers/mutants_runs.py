"""Small breaks in runs, engine and algorithms, each of which a test of the default run must see."""

from helpers.mutants import Mutant

LOOPS = "tests/algorithms/test_algorithms.py::test_equals_numpy"
CHECKPOINT = "tests/runs/test_checkpoint.py"
CLI = "tests/cli/test_cli.py"
KEPT = "tests/experiments/test_experiments_kept_runs.py"
ENGINE = "tests/contracts/test_engine.py"

MUTANTS = (
    # --- algorithms
    Mutant(
        "jfl/algorithms/scaffold.py",
        "drift = pytrees.sub(server.control, client_state)",
        "drift = pytrees.sub(client_state, server.control)",
        f"{LOOPS}[scaffold_noise_everywhere]",
    ),
    Mutant(
        "jfl/algorithms/scaffold.py",
        "jnp.where(context.round < warm, 0.0, 1.0)",
        "jnp.where(context.round <= warm, 0.0, 1.0)",
        f"{LOOPS}[scaffold_noise_everywhere]",
    ),
    Mutant(
        "jfl/algorithms/scaffold.py",
        "context.cohort / context.clients / rate_sum",
        "context.cohort / context.clients",
        f"{LOOPS}[scaffold_noise_everywhere]",
    ),
    Mutant(
        "jfl/algorithms/base.py",
        "pytrees.sub(params, center)",
        "pytrees.sub(center, params)",
        f"{LOOPS}[fedprox_private_and_release]",
    ),
    Mutant(
        "jfl/algorithms/fedsgd.py",
        "pytrees.scale(-1.0, gradient)",
        "pytrees.scale(1.0, gradient)",
        f"{LOOPS}[fedsgd_divided_by_size]",
    ),
    Mutant(
        "jfl/algorithms/padpfl.py",
        'pytrees.sub(release, server.params) if upload == "model" else release',
        "release",
        "tests/algorithms/test_padpfl.py::test_equals_numpy[printed]",
    ),
    Mutant(
        "jfl/algorithms/padpfl.py",
        "payload = trained if upload",
        "payload = start if upload",
        "tests/algorithms/test_padpfl.py::test_equals_numpy[printed]",
    ),
    Mutant(
        "jfl/algorithms/output_perturbation.py",
        "pytrees.cast_to(pytrees.scale(rate_sum, mean), dtypes)",
        "pytrees.cast_to(mean, dtypes)",
        "tests/algorithms/test_output_perturbation.py::test_equals_numpy[levels-all-40.0]",
    ),
    Mutant(
        "jfl/models/low_rank.py",
        "return y + (x @ a @ b)",
        "return y - (x @ a @ b)",
        "tests/models/test_low_rank.py::test_equal_to_a_model_with_the_product_in_its_kernels[loop]",
    ),
    Mutant(
        "jfl/engine/plan.py",
        "lambda params: loss(params, x, y), (params,), (tangents,)",
        "lambda params: loss(params, x, y), (params,), (params,)",
        "tests/engine/test_reach.py::test_training_that_reaches_the_model",
    ),
    # --- rounds
    Mutant(
        "jfl/engine/round.py",
        "return pytrees.add(sums, chunk_sums), new_states",
        "return chunk_sums, new_states",
        f"{LOOPS}[private_and_release_by_size]",
    ),
    Mutant(
        "jfl/engine/sharding.py",
        "return plan.sampler.clients, 0, 0",
        "return 0, 1, 0",
        f"{LOOPS}[private_and_release_by_size]",
    ),
    Mutant(
        "jfl/engine/round.py",
        'weights.at[ids].get(mode="fill", fill_value=0) * times_drawn',
        'weights.at[ids].get(mode="fill", fill_value=0) * (times_drawn > 0)',
        f"{LOOPS}[several_turns_short_batches]",
    ),
    Mutant(
        "jfl/engine/round.py",
        "client_key = lambda key: jax.random.fold_in(jax.random.fold_in(key, client_id), "
        "repeat_index)",
        "client_key = lambda key: jax.random.fold_in(key, client_id)",
        f"{LOOPS}[noise_by_round_and_client]",
    ),
    Mutant(
        "jfl/engine/round.py",
        "return sharding.psum_exact(sums), client_states",
        "return sums, client_states",
        "tests/engine/test_scale.py::test_eight_devices_are_one",
        slow=True,
    ),
    Mutant(
        "jfl/engine/round.py",
        "first_client=device * num_states",
        "first_client=0",
        "tests/engine/test_scale.py::test_eight_devices_are_one",
        slow=True,
    ),
    Mutant(
        "jfl/engine/round.py",
        "state_index = jnp.where(times_drawn > 0, ids - first_client, plan.sampler.clients)",
        "state_index = ids - first_client",
        f"{ENGINE}::test_slots_and_memory[scaffold]",
    ),
    Mutant(
        "jfl/engine/sharding.py",
        "cohort.ids // num_states == device",
        "cohort.ids % num_devices(plan.mesh) == device",
        "tests/engine/test_slots.py",
    ),
    Mutant(
        "jfl/engine/sharding.py",
        "overflow = (columns[1][num_slots:] > 0)",
        "overflow = (columns[1][num_slots:] < 0)",
        "tests/engine/test_slots.py",
    ),
    Mutant(
        "jfl/engine/sharding.py",
        "if sampling.is_full_participation(plan.sampler):\n        everyone",
        'if plan.sampler.scheme == "full":\n        everyone',
        "tests/engine/test_slots.py",
    ),
    Mutant(
        "jfl/engine/sharding.py",
        "as_int(high) * 2**HALF_BITS + as_int(low)",
        "as_int(high * 2**HALF_BITS + low)",
        "tests/engine/test_slots.py",
    ),
    Mutant(
        "jfl/engine/sharding.py",
        "mask = jnp.arange(len(jax.tree.leaves(items)[0])) < num_items",
        "mask = jnp.arange(len(jax.tree.leaves(items)[0])) >= 0",
        "tests/engine/test_scale.py::test_eight_devices_are_one",
        slow=True,
    ),
    Mutant(
        "jfl/engine/sharding.py",
        'names[0] == "client_states" or',
        'names[0] == "nothing" or',
        "tests/engine/test_scale.py::test_eight_devices_are_one",
        slow=True,
    ),
    Mutant(
        "jfl/engine/sweep.py",
        "if needed <= available or points == 1",
        "if needed <= 2**60 or points == 1",
        f"{ENGINE}::test_points_that_run_at_once_fit_into_memory",
    ),
    Mutant(
        "jfl/engine/round.py",
        "return jax.lax.select(run.attempt > 0, stream_key(key, Stream.ATTEMPT, run.attempt), key)",
        "return key",
        f"{ENGINE}::test_a_raised_attempt_changes_the_run",
    ),
    Mutant(
        "jfl/engine/round.py",
        "batch=batch_key, client_noise=keys[:2], server_noise=keys[2], run_noise=noise_key",
        "batch=batch_key, client_noise=keys[:2], server_noise=keys[1], run_noise=noise_key",
        f"{LOOPS}[private_and_release_by_size]",
    ),
    Mutant(
        "jfl/engine/sweep.py",
        "(zero, zero) if plan.paired_noise else (plan_identity, history)",
        "(zero, zero) if True else (plan_identity, history)",
        f"{ENGINE}::test_points_of_a_sweep_never_share_noise[rows]",
    ),
    Mutant(
        "jfl/algorithms/addpnfl.py",
        "(jnp.sqrt(signal) + adaptivity)",
        "jnp.sqrt(signal + adaptivity**2)",
        "tests/algorithms/test_dpnfl.py::test_equals_the_papers_loop[diff]",
    ),
    # --- runs that go on
    Mutant(
        "jfl/runs/train.py",
        "session.journal.announce(done, session.since",
        "session.journal.announce(done - 1, session.since",
        f"{CHECKPOINT}::test_nothing_is_computed_before_the_journal_knows_what_was_shown",
    ),
    Mutant(
        "jfl/runs/train.py",
        "if done - saved >= session.save_every or done == config.rounds:",
        "if done == config.rounds:",
        f"{CHECKPOINT}::test_a_run_that_dies_resumes_to_the_straight_one",
    ),
    Mutant(
        "jfl/core/files.py",
        "os.replace(temporary, path)",
        "path.write_bytes(temporary.read_bytes())",
        f"{CHECKPOINT}::test_a_run_that_dies_resumes_to_the_straight_one",
    ),
    Mutant(
        "jfl/runs/checkpoint.py",
        'if record["program"] == here and since <= done:',
        "if since <= done:",
        f"{CHECKPOINT}::test_another_program_does_not_release_rounds_again",
    ),
    Mutant(
        "jfl/runs/checkpoint.py",
        'if record["program"] == here and since <= done:',
        'if record["program"] == here:',
        f"{CHECKPOINT}::test_a_program_does_not_release_the_rounds_of_an_earlier_one",
    ),
    Mutant(
        "jfl/runs/checkpoint.py",
        'until if before is None else max(until, before["until"])',
        "until",
        f"{CHECKPOINT}::test_the_furthest_round_is_remembered_through_several_stops",
    ),
    Mutant(
        "jfl/runs/train.py",
        "if differ := differences(there, here):",
        "if differ := []:",
        f"{CHECKPOINT}::test_another_config_is_refused_and_named",
    ),
    Mutant(
        "jfl/runs/train.py",
        "report.void(out)  # the epsilon",
        "pass  # the epsilon",
        f"{CLI}::test_what_states_an_epsilon_of_fewer_rounds_goes",
        slow=True,
    ),
    # --- sweeps and the command line
    Mutant(
        "jfl/runs/sweep.py",
        'dataclasses.replace(point.config, seed=values["seed"])',
        "dataclasses.replace(point.config, seed=0)",
        "tests/runs/test_cluster.py::test_a_sweep_keeps_every_point_once",
    ),
    Mutant(
        "jfl/runs/sweep.py",
        "guarantees, values, shown = known[setting]",
        "guarantees, values, shown = next(iter(known.values()))",
        f"{CLI}::test_a_sweep_over_delta_proves_each_at_its_own",
    ),
    Mutant(
        "jfl/runs/sweep.py",
        "if failed == len(runs) or (strict and failed):",
        "if failed == len(runs):",
        f"{CLI}::test_failed_points_are_marked",
        slow=True,
    ),
    Mutant(
        "jfl/runs/sweep.py",
        "if setting in settings:",
        "if False:",
        f"{CLI}::test_a_sweep_calibrates_each_setting_once_and_says_what_is_not_counted",
    ),
    Mutant(
        "jfl/cli/__main__.py",
        "sys.exit(main())",
        "main()",
        f"{CLI}::test_as_a_program",
    ),
    # --- chunks without a client, and rows that travel
    Mutant(
        "jfl/engine/round.py",
        "fori_loop(0, num_to_run, add_chunk_number",
        "fori_loop(0, num_chunks, add_chunk_number",
        f"{ENGINE}::test_chunks_without_a_client_do_not_run",
        slow=True,
    ),
    Mutant(
        "jfl/engine/round.py",
        "_max_over_sweep(count.max(0) if",
        "_max_over_sweep(count.min(0) if",
        f"{ENGINE}::test_chunks_without_a_client_do_not_run",
        slow=True,
    ),
    Mutant(
        "jfl/engine/round.py",
        "x = jax.vmap(fed.host.prepare_row)(x).astype",
        "x = x.astype",
        "tests/engine/test_scale.py::test_rows_that_are_prepared_on_the_device_are_the_same_run",
    ),
    Mutant(
        "jfl/data/host_rows.py",
        "slice(a, b) for a, b in zip(ends, ends[1:])",
        "slice(a, b) for a, b in zip(ends, ends[1:-1])",
        "tests/engine/test_scale.py::test_rows_of_a_cohort_are_those_of_its_clients",
    ),
    # --- runs of experiments that are kept
    Mutant(
        "experiments/harness/kept_runs.py",
        "return [seed for seed in seeds if seed not in done]",
        "return list(seeds)",
        f"{KEPT}::test_figures_share_lines_and_more_seeds_are_only_the_new_ones",
    ),
    Mutant(
        "experiments/harness/kept_runs.py",
        "            shutil.rmtree(home / RUNNING)\n        yield\n",
        "            pass\n        yield\n",
        f"{KEPT}::test_a_sweep_of_an_experiments_own_begins_again",
    ),
    Mutant(
        "experiments/harness/kept_runs.py",
        "held[home].close()  # other processes may read it now",
        "pass",
        f"{KEPT}::test_what_is_done_or_not_begun_is_free_for_others",
    ),
    Mutant(
        "jfl/runs/record.py",
        "bad = any(count for name, count in self.health.items() if name not in self.tolerated)",
        "bad = False",
        f"{KEPT}::test_failed_runs_are_told_and_kept",
    ),
    Mutant(
        "jfl/runs/train.py",
        'if config.mode == "sound":\n        return ()',
        "if True:\n        return ()",
        "tests/experiments/test_experiments_ranaweera2025.py"
        "::test_a_run_shows_what_is_claimed_beside_what_is_proved",
    ),
)
