"""The plan: charges of the cost model against each device's memory, and the ways in which other planners went wrong."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.admission import CostModel, Device, SessionShape, plan
from memra_pp.admission.cost import workspace_bytes
from memra_pp.admission.planner import RESERVE_BYTES, widest_row
from memra_pp.cache import KvPolicy, slab_bytes, stage_layout
from memra_pp.cache.sizing import kv_layout
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan, SharedKvPlan, WeightBytes, estimate_weight_bytes
from memra_pp.errors import ConfigError, InputError

CONFIGS = pathlib.Path(__file__).parents[1] / "data" / "configs"
QWEN = ModelConfig.from_hf(CONFIGS / "qwen3_5-27b.json")
STEP = ModelConfig.from_hf(CONFIGS / "step3p5-flash.json")
E4B = ModelConfig.from_hf(CONFIGS / "gemma4-e4b.json")
GIB = 1 << 30
POLICY = KvPolicy()
KV, RECURRENT, NOTHING = KvPlan(1, 32, 32), RecurrentPlan(64, 4, 512), RecurrentPlan(0, 2, 0)


def model(layers, n_mtp: int = 0) -> ModelConfig:
    return ModelConfig("test", len(layers) - n_mtp, 64, 100, 1000, tuple(layers))


def weights_of(cfg: ModelConfig, layer: int = 0, embedding: int = 0, head: int = 0) -> WeightBytes:
    return WeightBytes((layer,) * cfg.n_layer, embedding, head, False, False, "test")


def devices(*memory: int, granularity: int = 1) -> list[Device]:
    return [Device(f"d{s}", nbytes, granularity) for s, nbytes in enumerate(memory)]


def bare(cfg: ModelConfig, rooms, ctx: int = 100, sessions: int | None = None, weights: WeightBytes | None = None, **options):
    """A plan in which each device has `rooms[s]` bytes beside workspace and reserve."""
    widest, last = widest_row(cfg), len(rooms) - 1
    taken = [workspace_bytes(1, cfg.n_embd, widest, cfg.n_vocab if s == last else 0) for s in range(len(rooms))]
    memory = [room + n for room, n in zip(rooms, taken, strict=True)]
    unit = options.pop("granularity", 1)
    weights = weights or weights_of(cfg)
    return plan(
        cfg, devices(*memory, granularity=unit), ctx, sessions, POLICY, weights=weights, reserve=0, max_rows=1, **options
    )


def slab(layer, ctx: int = 100) -> int:
    return CostModel(model([layer]), (0, 1), POLICY).charges(SessionShape(ctx))[0]


# Numbers that were checked elsewhere


def test_qwen_27b_takes_29_696_bytes_a_token_over_its_trunk():
    p = plan(QWEN.without_mtp(), devices(80 * GIB, 80 * GIB), 32768, None, POLICY)
    assert sum(stage.token_bytes for stage in p.even.stages) == 29_696


def test_qwen_27b_takes_156_893_184_bytes_a_snapshot_and_nine_of_them_for_states_of_eight_drafts():
    def charged(**shape):
        return plan(QWEN, devices(200 * GIB), 4096, None, POLICY, **shape).best.stages[0].session_bytes

    stage = plan(QWEN, devices(200 * GIB), 4096, None, POLICY).best.stages[0]
    assert stage.snapshot_bytes == charged() - charged(snapshots=0) == 156_893_184
    states = charged(recurrent="states", speculate=8) - charged(snapshots=0)
    assert states == 9 * 156_893_184 == 1_412_038_656


@pytest.mark.parametrize("ctx", [4639, 4640, 32768, 262144])
def test_step_in_rings_holds_36_layers_of_at_most_4639_rows(ctx):
    ringed = replace(POLICY, ring="step")
    windows = [layer for layer in STEP.layers if layer.window]
    assert len(windows) == 36 and sum(1 for layer in STEP.layers[STEP.n_trunk :] if layer.window) == 3

    def of_windows(policy, rows):
        cfg = replace(STEP, n_trunk=33, layers=tuple(windows))
        return plan(cfg, devices(900 * GIB), rows, None, policy, weights=weights_of(cfg)).best.stages[0].session_bytes

    assert of_windows(ringed, ctx) == of_windows(POLICY, 4639)
    full = [layer for layer in STEP.layers if not layer.window]
    whole = plan(STEP, devices(900 * GIB), ctx, None, ringed, weights=weights_of(STEP)).best.stages[0].session_bytes
    assert whole == of_windows(ringed, ctx) + sum(
        CostModel(model([layer]), (0, 1), ringed).charges(SessionShape(ctx))[0] for layer in full
    )


# The parts of a stage


def test_charges_are_what_stages_allocate_in_whole_units_of_their_devices():
    units = [1, 2 << 20, 1 << 16]
    some = [Device(f"d{s}", 80 * GIB, unit) for s, unit in enumerate(units)]
    p = plan(QWEN, some, 8192, None, POLICY, snapshots=2, recurrent="states", speculate=3, fence=(0, 7, 30, 64))
    for cut in (p.given, p.even, p.best):
        for s, stage in enumerate(cut.stages):
            layout = stage_layout(QWEN, cut.fence, s, 8192, POLICY, snapshots=2, recurrent="states", speculate=3)
            assert stage.session_bytes == slab_bytes(layout, units[s])


def test_room_is_memory_less_weights_workspace_and_reserve():
    weights = estimate_weight_bytes(QWEN)
    p = plan(QWEN, devices(80 * GIB, 48 * GIB), 8192, None, POLICY, reserve=5 * GIB, max_rows=64)
    first, last = p.even.stages
    assert (first.layers, last.layers) == (range(0, 32), range(32, 65))
    assert first.weight_bytes == sum(weights.layers[:32]) + weights.embedding
    assert last.weight_bytes == sum(weights.layers[32:]) + weights.head
    assert first.workspace_bytes == workspace_bytes(64, QWEN.n_embd, widest_row(QWEN))
    assert last.workspace_bytes == workspace_bytes(64, QWEN.n_embd, widest_row(QWEN), QWEN.n_vocab)
    for stage, memory in ((first, 80 * GIB), (last, 48 * GIB)):
        assert stage.room_bytes == memory - stage.weight_bytes - stage.workspace_bytes - 5 * GIB
        assert stage.sessions == stage.room_bytes // stage.session_bytes
        assert stage.free_bytes == stage.room_bytes - p.even.sessions * stage.session_bytes
    assert p.setup.weights.estimated
    assert plan(QWEN, devices(80 * GIB), 8192, None, POLICY).even.stages[0].reserve_bytes == RESERVE_BYTES == GIB


@pytest.mark.parametrize("states", [{}, {"snapshots": 2, "recurrent": "states", "speculate": 3}], ids=["replay", "states"])
@pytest.mark.parametrize("ring", ["off", "step", "all"])
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_session_is_its_rows_its_fixed_bytes_its_copies_and_padding(path, ring, states):
    cfg, policy, unit = ModelConfig.from_hf(path), replace(POLICY, ring=ring), 4096
    some = devices(80 * GIB, 80 * GIB, granularity=unit)
    for stage in plan(cfg, some, 8192, None, policy, weights=weights_of(cfg), **states).best.stages:
        kv = [kv_layout(cfg.layers[il], 8192, policy) for il in stage.layers if isinstance(cfg.layers[il], KvPlan)]
        assert stage.rows_bytes == sum(layer.rows * layer.tok_bytes for layer in kv) <= 8192 * stage.token_bytes
        assert stage.copies_bytes == (5 if states else 1) * stage.snapshot_bytes
        parts = stage.rows_bytes + stage.fixed_bytes + stage.copies_bytes + stage.padding_bytes
        assert parts == stage.session_bytes and 0 <= stage.padding_bytes < 256 * 13 * len(stage.layers) + unit


def test_the_widest_row_is_gate_and_up_or_what_a_mixer_projects_to():
    assert widest_row(QWEN) == 6 * 10240 > 2 * 17408
    dense = ModelConfig("test", 1, 64, 100, 1000, (KV,), {"num_attention_heads": 2, "intermediate_size": [900, 1000]})
    assert widest_row(dense) == 2000
    assert widest_row(replace(dense, hparams={"num_attention_heads": 2})) == 5 * 2 * 32 + 2 * 32 + 2 * 32
    assert widest_row(model([NOTHING])) == 0


# Where other planners went wrong


def test_a_stage_without_an_attention_layer():
    p = bare(model([RECURRENT, RECURRENT, KV, KV]), (slab(RECURRENT) * 20, slab(KV) * 7))
    first, last = p.even.stages
    assert (first.token_bytes, first.sessions, last.sessions) == (0, 10, 3)
    assert last.snapshot_bytes == 0 < first.snapshot_bytes
    assert (p.even.sessions, p.even.binding) == (3, 1)


def test_a_stage_without_a_recurrent_layer_is_not_charged_for_state():
    with_copies = bare(model([KV, RECURRENT]), (slab(KV) * 3, 10**6), snapshots=5).even
    assert (with_copies.stages[0].sessions, with_copies.stages[0].snapshot_bytes) == (3, 0)


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_layers_that_stages_do_not_divide(stages):
    cfg = model([KV] * 7)
    p = bare(cfg, [slab(KV) * 12] * stages)
    for cut in (p.even, p.best):
        assert [il for stage in cut.stages for il in stage.layers] == list(range(7))
        assert cut.sessions == 12 // max(len(stage.layers) for stage in cut.stages) == 12 // -(-7 // stages)


def test_the_smallest_device_may_hold_the_most_sessions():
    p = bare(model([KV] * 8), (slab(KV) * 5, slab(KV) * 14), fence=(0, 1, 8))
    small, large = p.given.stages
    assert (small.sessions, large.sessions, p.given.sessions, p.given.binding) == (5, 2, 2, 1)
    assert (p.even.sessions, p.even.binding) == (1, 0)
    assert (p.best.fence, p.best.sessions) == ((0, 2, 8), 2)


def test_an_mtp_block_is_a_layer_of_the_last_stage_and_no_model():
    trunk, block = [KV, KV, RECURRENT, KV], KvPlan(2, 32, 32)
    cfg = model([*trunk, block], n_mtp=1)
    weights = WeightBytes((10, 10, 10, 10, 7), 100, 200, False, False, "test")
    first, last = bare(cfg, (10**6, 10**6), weights=weights).even.stages
    alone, without = bare(cfg.without_mtp(), (10**6, 10**6)).even.stages
    assert first.session_bytes == alone.session_bytes
    assert last.session_bytes == without.session_bytes + slab(block)
    assert (first.weight_bytes, last.weight_bytes) == (120, 227)


def test_a_window_longer_than_the_context_rings_no_more_rows_than_there_are():
    cfg = model([KvPlan(1, 32, 32, window=512, ring="step")])
    for ctx in (1, 100, 511):
        for_rows = cfg, devices(2 * GIB), ctx, None
        flat, ringed = (plan(*for_rows, p, weights=weights_of(cfg)) for p in (POLICY, replace(POLICY, ring="step")))
        assert flat.best == ringed.best


@pytest.mark.parametrize("unit", [1, 4096])
def test_a_session_of_the_whole_room_fits_and_of_a_byte_more_does_not(unit):
    cfg = model([KV, RECURRENT, KV])
    whole = CostModel(cfg, (0, 3), POLICY, [unit]).charges(SessionShape(100))[0]
    assert bare(cfg, [whole], granularity=unit).best.sessions == 1
    short = bare(cfg, [whole - 1], granularity=unit).best
    assert (short.sessions, short.stages[0].free_bytes, short.shortest.stage) == (0, -1, 0)


def test_a_stage_that_keeps_nothing_holds_any_number_if_its_weights_fit():
    cfg = model([NOTHING, KV])
    p = bare(cfg, (0, slab(KV) * 4))
    assert [stage.sessions for stage in p.even.stages] == [None, 4]
    assert (p.even.sessions, p.even.binding) == (4, 1)
    lacking = bare(cfg, (0, slab(KV) * 4), weights=weights_of(cfg, layer=1)).even
    assert (lacking.sessions, lacking.binding, lacking.shortest.free_bytes) == (0, 0, -1)
    empty = bare(model([NOTHING, NOTHING]), (0, 0))
    assert empty.best.sessions is None and empty.best.shortest is None


def test_the_embedding_weighs_on_the_first_stage_and_the_head_on_the_last():
    cfg = model([KV] * 4)
    room = slab(KV) * 6
    heavy = {"embedding": weights_of(cfg, embedding=slab(KV) * 3), "head": weights_of(cfg, head=slab(KV) * 3)}
    assert bare(cfg, (room, room), weights=heavy["embedding"]).even.binding == 0
    p = bare(cfg, (room, room), weights=heavy["head"])
    assert (p.even.binding, p.even.sessions) == (1, 1)
    assert (p.best.fence, p.best.sessions) == ((0, 3, 4), 2)


def test_a_tied_matrix_is_held_once_by_a_single_stage():
    cfg = model([KV, KV])
    tied = WeightBytes((0, 0), 50, 52, True, False, "test", 50)
    assert bare(cfg, [10**6], weights=tied).even.stages[0].weight_bytes == 52
    assert [stage.weight_bytes for stage in bare(cfg, [10**6] * 2, weights=tied).even.stages] == [50, 52]


# Cuts


def test_the_even_cut_gives_way_to_shared_rows():
    p = plan(E4B, devices(*[80 * GIB] * 4), 8192, None, POLICY)
    assert p.even.fence[1:3] == (10, 21) and p.even.fence[3] < 31 - 6
    assert p.best.sessions >= p.even.sessions


def test_the_binding_stage_is_the_one_that_lacks_most_for_one_more():
    cfg = model([KV] * 3)
    assert bare(cfg, (slab(KV) * 3 - 1, slab(KV) * 2, slab(KV) * 2 + 1)).even.binding == 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-1000, 300_000), min_size=1, max_size=4), st.integers(1, 400), st.integers(1, 20), st.integers(0, 5000)
)
def test_what_fits_fits_and_one_more_does_not(rooms, ctx, asked, layer):
    cfg = model([KV, RECURRENT, KV, KV, RECURRENT, KV], n_mtp=1)
    weights = weights_of(cfg, layer=layer, embedding=layer, head=2 * layer)
    p = bare(cfg, rooms, ctx, weights=weights)
    assert p.best.sessions >= p.even.sessions

    wanted = bare(cfg, rooms, ctx, asked, weights)
    for cut in (wanted.even, wanted.best):
        assert (cut.shortest is None) == (asked <= cut.sessions)


def test_a_plan_says_how_much_is_short_and_where():
    p = bare(model([KV] * 2), (slab(KV) * 5, slab(KV) * 9), sessions=7)
    assert (p.even.sessions, p.even.shortest.stage, p.even.shortest.free_bytes) == (5, 0, -2 * slab(KV))
    assert bare(model([KV] * 2), (slab(KV) * 5, slab(KV) * 9), sessions=5).even.shortest is None


def test_a_stage_is_bound_by_what_takes_the_most_of_it():
    cfg = model([KV] * 2)
    p = bare(cfg, (slab(KV) * 5, slab(KV) * 25), weights=weights_of(cfg, head=slab(KV) * 20))
    assert [stage.bound_by for stage in p.even.stages] == ["cache", "weights"]
    memory, reserve = [3 * GIB, 3 * GIB], {"reserve": GIB * 3 // 2, "weights": weights_of(cfg, head=GIB)}
    kept = plan(cfg, devices(*memory), 100, None, POLICY, **reserve).even.stages
    assert [stage.bound_by for stage in kept] == ["workspace and reserve"] * 2
    assert kept[1].kept_bytes == kept[1].workspace_bytes + kept[1].reserve_bytes > max(kept[1].weight_bytes, kept[1].room_bytes)


# Refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ctx": 0}, "ctx=0: choose from 1 to 1000"),
        ({"ctx": 1001}, "ctx=1001: choose from 1 to 1000"),
        ({"ctx": "9"}, "ctx='9'"),
        ({"devices": []}, "at least one"),
        ({"devices": devices(*[GIB] * 3)}, "choose from 1 to 2"),
        ({"devices": devices(0)}, "memory of d0=0"),
        ({"devices": devices(GIB, granularity=0)}, "granularity of d0=0"),
        ({"sessions": 0}, "sessions=0"),
        ({"snapshots": 33}, "snapshots=33: it must be an integer from 0 to 32"),
        ({"devices": ["8GiB"]}, "devices='8GiB': it must be a Device each"),
        ({"speculate": 4, "snapshots": 0}, "speculate=4 with snapshots=0: drafts are rolled back to a snapshot"),
        ({"speculate": 512}, "speculate=512: it must be an integer from 0 to 511"),
        ({"reserve": -1}, "reserve=-1"),
        ({"max_rows": 5000}, "max_rows=5000"),
        ({"fence": (0, 3)}, "stages=1, devices=2; there must be one a stage"),
        ({"fence": (0, 1, 3)}, "cut 1 parts layer 1 from layer 0"),
        ({"weights": weights_of(model([KV]))}, "weights of 1 layers for a model of 3"),
    ],
)
def test_bad_options_are_refused(options, says):
    cfg = model([KV, SharedKvPlan(0), KV])
    good = {"devices": devices(GIB * 2, GIB * 2), "ctx": 100, "sessions": None, "weights": weights_of(cfg)}
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        plan(cfg, policy=POLICY, **{**good, **options})


def test_bad_ways_to_roll_back_are_refused():
    with pytest.raises(InputError, match="replay or states"):
        plan(QWEN, devices(GIB), 100, None, POLICY, recurrent="undo")


def test_devices_may_be_given_as_their_bytes():
    cfg = ModelConfig.from_hf(CONFIGS / "llama3_1-70b.json")
    named = plan(cfg, [Device("device 0", 160 << 30), Device("device 1", 80 << 30)], 8192, None, KvPolicy())
    assert plan(cfg, [160 << 30, 80 << 30], 8192, policy=KvPolicy()) == named and named.best.sessions
