"""The tool that compiles for accelerators that are not here: what it reads in a program's text.

The programs are written by hand, in the two dialects: a GPU's compiler notes the turns of a loop, a
TPU's leaves them to be read from the loop itself.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from experiments.bench import aot, device
from experiments.bench.ahead_of_time import counts, machines, program, report, workloads

GPU, TPU = machines.TARGETS["h200"], machines.TARGETS["v5e"]

FUSIONS = """
%narrow (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %twice = f32[8,4]{1,0} add(%a, %a)
}

%wide (b: u32[8,4]) -> u32[8,4] {
  %b = u32[8,4]{1,0} parameter(0)
  %long = u64[8,4]{1,0} convert(%b)
  %product = u64[8,4]{1,0} multiply(%long, %long)
  ROOT %short = u32[8,4]{1,0} convert(%product)
}

%sum (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %added = f32[] add(%c, %d)
}
"""
STEP = """
%step (s: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %s = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %i.copy = s32[] copy(%i)
  %next = s32[] add(%i.copy, %one)
  %moved = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%narrow
  ROOT %state = (s32[], f32[8,4]{1,0}) tuple(%next, %moved)
}

%more (t: (s32[], f32[8,4])) -> pred[] {
  %t = (s32[], f32[8,4]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(LIMIT)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}
"""
ROUND = """
%round (r: (s32[], f32[8,4], s32[], u32[8,4])) -> (s32[], f32[8,4], s32[], u32[8,4]) {
  %r = (s32[], f32[8,4]{1,0}, s32[], u32[8,4]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%r), index=0
  %y = f32[8,4]{1,0} get-tuple-element(%r), index=1
  %many = s32[] get-tuple-element(%r), index=2
  %u = u32[8,4]{1,0} get-tuple-element(%r), index=3
  %start = s32[] constant(FIRST)
  %one.2 = s32[] constant(1)
  %begun = (s32[], f32[8,4]{1,0}) tuple(%start, %y)
  %walk = (s32[], f32[8,4]{1,0}) \
while(%begun), condition=%more, body=%step, \
metadata={op_name="jit(f)/rounds/while/body/vmap(INNER)/while"}NOTE
  %after = f32[8,4]{1,0} get-tuple-element(%walk), index=1
  %together = f32[8,4]{1,0} all-reduce(%after), replica_groups={{0,1}}, to_apply=%sum
  %drawn = u32[8,4]{1,0} fusion(%u), kind=kLoop, calls=%wide
  %k.2 = s32[] add(%k, %one.2)
  ROOT %result = (s32[], f32[8,4]{1,0}, s32[], u32[8,4]{1,0}) tuple(%k.2, %together, %many, %drawn)
}

%again (q: (s32[], f32[8,4], s32[], u32[8,4])) -> pred[] {
  %q = (s32[], f32[8,4]{1,0}, s32[], u32[8,4]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%q), index=0
  %to = s32[] get-tuple-element(%q), index=2
  ROOT %below = pred[] compare(%at, %to), direction=LT
}

ENTRY %main (z: f32[8,4], n: s32[], v: u32[8,4]) -> f32[8,4] {
  %z = f32[8,4]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %v = u32[8,4]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %warm = f32[8,4]{1,0} fusion(%z), kind=kLoop, calls=%narrow
  %first = (s32[], f32[8,4]{1,0}, s32[], u32[8,4]{1,0}) tuple(%zero, %warm, %n, %v)
  %run = (s32[], f32[8,4]{1,0}, s32[], u32[8,4]{1,0}) \
while(%first), condition=%again, body=%round, \
metadata={op_name="jit(f)/OUTER/while"}
  ROOT %out = f32[8,4]{1,0} get-tuple-element(%run), index=1
}
"""
NOTE = ', backend_config={"known_trip_count":{"n":"7"}}'


def text(note="", outer="rounds", inner="local_steps", limit="5", first="0"):
    found = "HloModule jit_f\n" + FUSIONS + STEP.replace("LIMIT", limit)
    found += ROUND.replace("NOTE", note).replace("OUTER", outer).replace("FIRST", first)
    return found.replace("INNER", inner)


def rounds(target=TPU, turns=None, **changes):
    """The loop over rounds of the program."""
    (found,) = counts.read(text(**changes), target, turns).scoped("rounds")
    return found[1]


def test_a_loop_turns_as_often_as_the_compiler_notes():
    assert rounds(GPU, note=NOTE).loops[0].turns == (7, 7)
    assert rounds(GPU, note=NOTE).whole().launches["fusion"] == 8


def test_a_loop_turns_as_often_as_it_is_written():
    loop = rounds()
    assert loop.loops[0].turns == (5, 5)
    assert loop.whole().launches == dict(fusion=6, collective=1)
    # a step reads and writes 128 bytes; so does the wide fusion, and the sum
    assert loop.whole().bytes == 7 * 256


@pytest.mark.parametrize("changed", [dict(first="2"), dict(limit="n")])
def test_a_loop_that_begins_elsewhere_or_ends_somewhere_is_unknown(changed):
    with pytest.raises(counts.UnknownLoops, match=r"loop local_steps .*vmap\(local_steps\)/while"):
        rounds(**changed)


def test_a_loop_with_another_step_is_unknown():
    odd = text().replace("%one = s32[] constant(1)", "%one = s32[] constant(2)")
    with pytest.raises(counts.UnknownLoops, match="local_steps"):
        counts.read(odd, TPU)


def test_a_loop_that_may_end_sooner_is_unknown():
    early = text().replace(
        "  ROOT %less = pred[] compare(%j, %limit), direction=LT\n",
        "  %less = pred[] compare(%j, %limit), direction=LT\n"
        "  ROOT %both = pred[] and(%less, %less)\n",
    )
    with pytest.raises(counts.UnknownLoops, match="local_steps"):
        counts.read(early, TPU)


def test_an_unknown_loop_turns_as_often_as_it_is_told():
    told = rounds(turns=dict(local_steps=counts.Turns(3, 9)), first="2")
    assert told.whole().launches["fusion"] == 4
    assert told.whole("capacity").launches["fusion"] == 10
    by_body = rounds(turns=dict(step=counts.Turns(3, 3)), first="2", inner="body")
    assert by_body.whole().launches["fusion"] == 4
    # what the compiler knows is not overruled
    assert rounds(turns=dict(local_steps=counts.Turns(3, 9))).loops[0].turns == (5, 5)


def test_the_rounds_are_found_by_name_and_not_by_size():
    """A larger loop of unknown turns beside them is an error."""
    with pytest.raises(counts.UnknownLoops, match=r"loop round \(op_name jit\(f\)/body/while\)"):
        counts.read(text(outer="body"), TPU)
    program_ = counts.read(text(outer="body"), TPU, dict(round=counts.Turns(10, 10)))
    assert program_.scoped("rounds") == []
    assert program_.whole().launches["fusion"] == 1 + 10 * 6
    loops = counts.read(text(), TPU)
    assert loops.whole(without=rounds()).launches["fusion"] == 7  # another object: nothing left out
    assert loops.whole(without=loops.loops[0]).launches == dict(fusion=1)


def test_operations_on_64_bits_are_counted():
    loop = rounds()
    assert loop.turn.wide == 3 * 32  # two conversions, a product
    assert loop.whole().wide == 3 * 32 and loop.loops[0].turn.wide == 0
    assert loop.turn.other == 3 * 32
    assert program.wide_lines(text()) == 2  # whose result is wide
    assert program.wide_lines(text().replace("u64", "u32")) == 0
    assert rounds().turn.wide and not counts.read(text().replace("u64", "u32"), TPU).whole().wide


HALF = """
%half (b: u32[8]) -> u32[8] {
  %b = u32[8]{0} parameter(0)
  %long = u64[8]{0} convert(%b)
  %by = u64[] constant(3528531795)
  %each = u64[8]{0} broadcast(%by), dimensions={}
  %product = u64[8]{0} multiply(%long, %each)
  %bits = u64[] constant(32)
  %all = u64[8]{0} broadcast(%bits), dimensions={}
  %shifted = u64[8]{0} shift-right-logical(%product, %all)
  %upper = u32[8]{0} convert(%shifted)
  ROOT %mixed = u32[8]{0} xor(%upper, %b)
}

ENTRY %main (a: u32[8]) -> u32[8] {
  %a = u32[8]{0} parameter(0)
  ROOT %drawn = u32[8]{0} fusion(%a), kind=kLoop, calls=%half
}
"""


def operations(text, target=GPU):
    """All of a program without loops, and those on 64 bits."""
    cost = counts.Reader(text, target, {}).body("main", "", None).whole()
    return cost.other, cost.wide


def test_the_upper_half_of_a_product_is_one_operation_of_a_gpu():
    assert operations(HALF) == (2 * 8, 4 * 8)  # written in 64 bits all the same
    assert operations(HALF, TPU) == (5 * 8, 4 * 8)
    for changed in (
        HALF.replace("constant(32)", "constant(31)"),
        HALF.replace("constant(3528531795)", "constant(4294967296)"),
        HALF.replace("%shifted = u64[8]{0} shift-right-logical", "%shifted = u64[8]{0} add"),
        HALF.replace("%b = u32[8]", "%b = u64[8]").replace("%upper, %b", "%upper, %upper"),
        HALF.replace("u32[8]{0} convert(%shifted)", "u32[8]{0} convert(%product)"),
    ):
        assert operations(changed)[0] > 2 * 8 and operations(changed)[1] >= 3 * 8


def test_collectives_are_counted():
    assert rounds().whole().collectives == {"all-reduce": 1}
    assert rounds().whole().collective_bytes == 128
    begun = (
        text()
        .replace(
            "%together = f32[8,4]{1,0} all-reduce(%after)",
            "%begun.2 = f32[8,4]{1,0} all-reduce-start(%after)",
        )
        .replace("tuple(%k.2, %together", "tuple(%k.2, %begun.2")
    )
    (found,) = counts.read(begun, GPU, dict(local_steps=counts.Turns(1, 1))).scoped("rounds")
    assert found[1].whole().collectives == {"all-reduce": 1}


def test_a_gpu_waits_for_the_host_where_a_number_decides():
    assert rounds(GPU, note=NOTE).whole().host_waits == 1  # the rounds, whose end is data
    assert counts.read(text(note=NOTE), GPU).turn.host_waits == 1  # and once to see that it ends
    never = counts.read(text(first="2"), GPU, dict(local_steps=counts.Turns(0, 1)))
    assert never.scoped("rounds")[0][1].whole().host_waits == 2
    assert rounds(TPU).whole().host_waits == 0
    call = text().replace(
        "%drawn = u32[8,4]{1,0} fusion(%u), kind=kLoop, calls=%wide",
        '%drawn = u32[8,4]{1,0} custom-call(%u), custom_call_target="xla_python_cpu_callback"',
    )
    (found,) = counts.read(call, TPU).scoped("rounds")
    assert found[1].whole().host_waits == 1 and found[1].whole().launches["host"] == 1


def test_the_gradient_of_a_pooling_takes_time():
    """A TPU's compiler has no estimate for it; what has none because it runs beside others, such as
    a copy, takes none."""
    step = text().replace(
        "%moved = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%narrow",
        "%moved = f32[8,4]{1,0} select-and-scatter(%x, %x, %one), window={size=2x2 stride=2x2}",
    )
    (pooled, plain) = (
        counts.read(found, TPU).scoped("local_steps")[0][1].turn for found in (step, text())
    )
    assert plain.seconds == 0 and pooled.seconds == (3 * 4 * 32 + 4) / TPU.bandwidth


def test_flops_and_padding():
    one = program.instruction(
        "%d = f32[8,10]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    a = program.instruction("%a = f32[8,4]{1,0} parameter(0)")
    b = program.instruction("%b = f32[4,10]{1,0} parameter(1)")
    assert counts._multiplied(one, [a, b]) == 2 * 8 * 10 * 4
    (padded,) = program.arrays_of("f32[20,3]{1,0:T(8,128)}")
    assert padded.count == 24 * 128 and padded.bytes() == 4 * 24 * 128 and not padded.near
    assert program.arrays_of("f32[3]{0:T(128)S(1)}")[0].near


CLIENTS = (
    "%c = f32[7,5,12,12,6]{4,1,0,3,2} convolution(%x, %k), window={size=3x3x7 stride=1x1x6 "
    "pad=1_1x1_1x0_0 lhs_dilate=1x1x7}, dim_labels=2b01f_201io->2b01f"
)
ALONE = (
    "%c = f32[35,12,12,6]{3,2,1,0} convolution(%x, %k), window={size=3x3 pad=1_1x1_1}, "
    "dim_labels=b01f_01io->b01f"
)


@pytest.mark.parametrize(
    "written, kernel, multiplied",
    [(CLIENTS, (7, 3, 3, 4, 6), 3 * 3 * 4), (ALONE, (3, 3, 4, 6), 3 * 3 * 4)],
    ids=["clients", "alone"],
)
def test_flops_of_convolutions(written, kernel, multiplied):
    """A TPU's compiler writes clients with kernels of their own as one more axis of a window, of
    which every place meets one client alone."""
    one = program.instruction(written)
    x = program.instruction("%x = f32[35,12,12,4]{3,2,1,0} parameter(0)")
    k = program.instruction(f"%k = f32[{','.join(map(str, kernel))}] parameter(1)")
    assert counts._multiplied(one, [x, k]) == 2 * (35 * 12 * 12 * 6) * multiplied


@pytest.mark.parametrize(
    "source, scope",
    [
        ("jit(_scan)/while/body/closed_call/rounds/while", "rounds"),
        (
            "jit(_scan)/rounds/while/body/chunks/while/body/vmap(vmap(local_steps))/while",
            "local_steps",
        ),
        ("jit(_scan)/rounds/while/body/vmap(vmap())/while", ""),
        ("jit(_scan)/while", ""),
        ("jit(_scan)/rounds/while/body/while", ""),
        ("", ""),
    ],
)
def test_scopes(source, scope):
    assert program.scope_of(source) == scope


def test_a_report_takes_a_program_apart():
    """Into what stands around the rounds, a round, and a step of all chunks."""
    turns = dict(local_steps=counts.Turns(10, 20))  # two chunks of five steps
    loops = counts.read(text(first="2"), TPU, turns)
    found = report.Report("v5e", 1.0, {}, program.wide_lines(text()), loops, 5, "")
    row = found.row()
    assert row["once"]["launches"] == 1 and row["step"]["launches"] == 2
    assert row["round"]["launches"] == 12 and row["round_at_capacity"]["launches"] == 22
    assert row["round"]["launches_by_kind"] == dict(fusion=11, collective=1)
    assert row["how"] == "compiled" and row["wide_written"] == 2
    said = report.shown(found, launches=1)
    assert "at capacity: 22 launches" in said and "moved" in said and "10 x local_steps" in said
    same = counts.read(text(), TPU)
    assert "round_at_capacity" not in report.Report("v5e", 1.0, {}, 0, same, 5, "").row()


def test_a_program_whose_rounds_have_lost_their_name_is_refused():
    loops = counts.read(text(outer="body"), TPU, dict(round=counts.Turns(10, 10)))
    with pytest.raises(ValueError, match="one loop in a scope 'rounds'; got 0"):
        report.Report("v5e", 1.0, {}, 0, loops, 5, "").row()


SHAPES = dict(W1="2783babaac6d8081", W2="c029ba7a45134a11")


@pytest.mark.parametrize("name", SHAPES)
def test_workloads_stay_what_they_are(name):
    """Who changes a workload changes its hash, here and in all rows."""
    assert workloads.workload(name).hash() == SHAPES[name]
    assert workloads.workload(name, steps=2).hash() != SHAPES[name]
    assert workloads.workload(name, ("plain",)).hash() != SHAPES[name]


def test_a_poisson_cohort_reports_its_mean_and_its_capacity():
    cohort = workloads.workload("W1", ("poisson",)).cohort()
    assert cohort["mean"] == 10 and 10 < cohort["capacity"] <= 100


def test_compilers_of_another_version_are_refused():
    here = dict.fromkeys(machines.PACKAGES["cuda"], "12.9") | dict(jax="0.10.2")
    with pytest.raises(machines.MissingCompiler, match=r"not installed \(libtpu\)"):
        machines.check(TPU, here)
    plugged = here | dict.fromkeys(machines.OF_JAXS_VERSION, "0.10.2")
    machines.check(GPU, plugged)
    with pytest.raises(machines.MissingCompiler, match=r"jax is 0.10.2.*pjrt 0.10.1.*pip install"):
        machines.check(GPU, plugged | {"jax-cuda12-pjrt": "0.10.1"})


def test_the_command_refuses_and_says_what(capsys, monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(aot, "compile_one", lambda *_: counts.read(text(first="2"), TPU, {}) and {})
    assert aot.main(["--target", "v5e", "--out", str(out)]) == 1
    assert "loop local_steps" in capsys.readouterr().err and not out.exists()
    for wrong in ("rounds", "rounds=x", "rounds=3:1", "=1"):
        with pytest.raises(SystemExit):
            aot.options(["--turns", wrong])
    assert aot.options(["--turns", "a=2", "b=1:4"]).turns == [("a", (2, 2)), ("b", (1, 4))]


def test_a_row_replaces_the_one_of_the_same_program(tmp_path):
    out, row = tmp_path / "rows.json", dict.fromkeys(aot.SAME, 1)
    for launches in (1, 2):
        aot.save(out, row | dict(launches=launches))
    aot.save(out, row | dict(target=2))
    assert [r.get("launches") for r in json.loads(out.read_text())["rows"]] == [2, None]


def test_chunks_of_a_poisson_cohort_turn_as_often_as_their_law_says(monkeypatch):
    """Twenty of a hundred: seldom more than twenty-eight."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    one = workloads.workload("W1", ("poisson",), cohort=20, clients=100).plan
    assert one.chunk == 28 and one.sampler.capacity == 100
    told = report.chunk_turns(one)["chunks"]
    assert told.capacity == 4 and 1.015 < told.mean < 1.025
    assert report.chunk_turns(workloads.workload("W1").plan) == {}
    drawn = np.random.default_rng(0).binomial(100, 0.2, 100_000)
    assert abs(np.ceil(drawn / 28).mean() - told.mean) < 5e-3


@pytest.mark.parametrize("mode", ["private", "poisson"])
def test_the_device_that_holds_most_of_a_cohort_decides(mode, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    plan = workloads.workload("W1", (mode,), "scaffold", clients=800, cohort=80, chunk=9).plan
    plan = dataclasses.replace(plan, mesh=AbstractMesh((8,), ("clients",)))
    told, rng = report.chunk_turns(plan)["chunks"], np.random.default_rng(0)
    drawn = (
        rng.binomial(100, 0.1, (100_000, 8))
        if mode == "poisson"
        else rng.multivariate_hypergeometric([100] * 8, 80, 100_000)
    )
    # told as if devices were independent and drew with replacement
    assert abs(np.ceil(drawn.max(1) / 9).mean() - told.mean) < (5e-3 if mode == "poisson" else 0.1)
    assert told.capacity >= np.ceil(drawn.max() / 9)


def test_rows_of_a_workload_have_its_shapes():
    """So what a device is timed with is what was compiled for it."""
    few = dict(rows=10, clients=12)
    made = workloads.workload("W1", fed=workloads.random_rows("W1", **few), **few)
    assert made.hash() == workloads.workload("W1", **few).hash()


@pytest.mark.slow
def test_a_device_is_timed_and_what_fails_is_told(capsys, monkeypatch, tmp_path):
    """On the CPU that is here, at a small size: a row for every job, those that failed by name."""
    monkeypatch.setattr(device, "SECONDS", 0.1)
    monkeypatch.setattr(device, "CIFAR_ROUNDS", 2)
    out, one_run = tmp_path / "rows.json", device.one_run

    def broken(plan):
        if plan.algorithm.name == "scaffold":
            raise RuntimeError("out of memory")
        return one_run(plan)

    monkeypatch.setattr(device, "one_run", broken)
    few = dict(rows=10, clients=12, cohort=4, batch=5, steps=2)
    names = ["W1", "W4", "W6", "cifar10"]
    assert device.main(names, out=out, numbers=few) == 1
    rows = {(r["name"], r["mode"]): r for r in json.loads(out.read_text())["rows"]}
    assert set(rows) == {(j.name, j.mode) for j in device.jobs() if j.name in names}
    assert "out of memory" in rows.pop(("W6", "private"))["skipped"]
    for row in rows.values():
        assert row["seconds"] > 0 and row["compile_seconds"] > 0 and row["device"]
    assert "ms a round" in capsys.readouterr().out
    assert device.main(["W1"], minutes=0, out=out) == 0
    assert "no time left" in capsys.readouterr().out


def test_a_clock_stands_beside_the_floor_of_its_own_shapes(monkeypatch):
    """Of this device and this workload; others have none."""
    monkeypatch.setattr(device, "target", lambda: "h200")
    made = workloads.workload("W1")
    (row,) = (
        r
        for r in json.loads(aot.RESULTS.read_text())["rows"]
        if (r["shapes"], r["target"], r["points"], r["devices"]) == (made.hash(), "h200", 0, 1)
    )
    assert device.floor(made, 0)["floor"] == row["round"]["seconds"] > 0
    assert device.floor(workloads.workload("W1", steps=2), 0) == {}
    monkeypatch.setattr(device, "target", lambda: None)
    assert device.floor(made, 0) == {}
