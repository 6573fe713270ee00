"""What ``benchmarks distributed`` predicts, counts, judges and writes, without a GPU."""

import json
import math
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="it trains models")

from benchmarks._table import RESULTS  # noqa: E402  # without torch they cannot be imported
from benchmarks.distributed import (  # noqa: E402
    distributed,
    model,
    models,
    ranks,
    table,
    training,
)
from sparsefmt.distributed import halo  # noqa: E402

LAYERS = [model.Layer(64, 1000, 0, 0, 1), model.Layer(64, 2000, 256, 256)]
MACHINE = model.Machine(gathered=1e12, flops=1e13, copied=1e12, rest=1e-9)
LINK = model.Link(bandwidth=1e10, latency=1e-5)


@pytest.mark.parametrize(("ranks", "degree"), [(2, 3), (4, 1), (8, 20)])
def test_the_expected_halo_is_that_of_random_graphs(ranks, degree):
    n = 4000
    columns = np.random.default_rng(0).integers(0, n, n * degree // ranks)
    found = len(np.unique(columns[columns >= n // ranks]))
    assert model.expected_halo(n, n * degree, ranks) == pytest.approx(found, rel=0.05)


def test_a_halo_has_no_more_vertices_than_there_are_entries_or_others():
    assert model.expected_halo(1e6, 1e3, 1000) == pytest.approx(1.0, rel=0.01)
    assert model.expected_halo(100, 1e9, 4) == pytest.approx(75)
    assert model.expected_halo(100, 1e9, 1) == 0
    assert model.even_share(100, 1000, 1) == model.Share(100, 1000, 1.0, 0.0)


def test_products_of_own_rows_hide_the_exchange():
    share = model.Share(1e6, 1e7, 0.5, 1e3)
    hidden = model.step(LAYERS, share, MACHINE, LINK, ranks=2, parameters=1e6)
    assert hidden.exchange == pytest.approx(2 * (1e-5 + 256e3 / 1e10))
    assert hidden.exposed == 0
    bare = model.step(LAYERS, share, MACHINE, LINK, ranks=2, parameters=1e6, overlap=False)
    assert bare.total == pytest.approx(hidden.total + hidden.exchange)
    assert bare.hidden == 0


def test_ranks_add_up_parts_and_meet_for_two_sums():
    share, layer = model.Share(1e6, 0, 0.5, 1e3), model.Layer(64, 0, 256, 512, added=40)
    machine, link = model.Machine(1e12, 1e13, 1e12), model.Link(1e10, 1e-5, peer=1e-6)
    found = model.step([layer], share, machine, link, ranks=4, parameters=1e6)
    assert found.compute == pytest.approx((2 * 1e3 * (256 + 512) + 1e6 * 40) / 1e12)
    assert found.reduce == pytest.approx(2 * (1e-5 + 2e-6) + 1.5 * 1e6 / 1e10)
    alone = model.step([layer], share, machine, link, ranks=1, parameters=1e6)
    assert alone.compute == alone.reduce == 0


def test_layers_send_the_narrower_width_and_no_constant_features():
    first, second, last = models.layers_of("sage", 100, 47, 256)
    assert (first.width, first.forward, first.products) == (100, 0, 1)
    assert first.flops == 2 * 2 * 100 * 256  # for neighbours and for a vertex itself
    assert (second.width, second.forward, second.backward) == (256, 1024, 1024)
    assert (last.width, last.forward, last.backward) == (47, 188, 188)
    assert models.layers_of("sage", 602, 41, 256)[0].forward == 1024  # mapped first
    assert [one.forward for one in models.layers_of("gat", 602, 41, 256)] == [512, 512, 164]
    assert models.layers_of("gat", 100, 47, 256)[0].forward == 0  # travels once
    kept = models.layers_of("maxk", 602, 41, 256)
    assert {(one.forward, one.backward) for one in kept} == {(32 * 5, 32 * 4)}
    maps = 3 * 3 * 4 * 256**2 + 2 * 2 * 602 * 256 + 3 * 2 * 256 * 41
    assert 2 * kept[0].flops + 3 * (kept[1].flops + kept[2].flops) == maps


def test_a_machine_is_calibrated_to_a_step():
    whole = model.even_share(1e6, 1e7, 1)
    found = model.calibrated(LAYERS, whole, MACHINE, 0.02)
    step = model.step(LAYERS, whole, found, LINK, ranks=1, parameters=0)
    assert step.total == pytest.approx(0.02)
    assert model.calibrated(LAYERS, whole, MACHINE, 1e-9).rest == 0


def test_a_link_is_fitted_to_exchanges():
    sizes = [1 << 22, 1 << 26, 1 << 29]
    found = model.fitted(sizes, [2e-5 + size / 3e11 for size in sizes])
    assert found.bandwidth == pytest.approx(3e11)
    assert found.latency == pytest.approx(2e-5)
    found = model.fitted(sizes, [1e-9 * size for size in sizes])
    assert found.latency == pytest.approx(0, abs=1e-9)
    found = model.fitted(sizes, [1 / (k + 1) for k in range(len(sizes))])  # larger ones are faster
    assert found.latency == 0
    assert found.bandwidth == pytest.approx(sizes[-1] * len(sizes))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("size", [*training.SENT, *training.QUICK_SENT])
def test_parts_of_an_exchange_begin_at_whole_words(size, ranks):
    part, nbytes = training.part_of(size << 20, ranks - 1), size << 20
    assert part % 1024 == 0
    assert nbytes - 4096 * ranks < 4 * part * (ranks - 1) <= nbytes
    assert training.part_of(1, ranks) == 1024


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_the_width_grows_until_memory_does_not_do(monkeypatch, error):
    monkeypatch.setattr(training._harness, "free", lambda: None)
    monkeypatch.setattr(training.gc, "collect", lambda: None)  # 0.3 s each

    def train(most, width):
        if width > most:
            raise error("too wide")

    for most, widths in ((300, (256, 576)), (0, (0, training.WIDTHS[0]))):
        assert training.until_memory(partial(train, most)) == widths
    assert training.until_memory(lambda width: None) == (training.WIDTHS[-1], None)


def test_ways_take_turns_and_all_of_a_block_but_its_first_are_timed():
    runs = []
    ways = {name: lambda name=name: runs.append(name) for name in "ab"}
    found = ranks.step_ms(ways, cuda=False, runs=ranks.BLOCK + 1, warmups=1)
    assert sorted(found) == ["a", "b"]
    assert runs[:2] == ["a", "b"]
    assert runs.count("a") == runs.count("b") == 1 + ranks.BLOCK + 1 + 2


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_exchanges_of_a_step_are_repeated_one_by_one(alone, monkeypatch):
    dist, given, sent = torch.distributed, torch.ones(6, 4), []
    before = halo._all_gather
    monkeypatch.setattr(dist, "all_to_all_single", lambda into, *_, **__: sent.append(into))
    with ranks.repeatable() as found:
        for tensor in (given, given, given.long()):
            into = torch.empty_like(tensor)
            dist.all_to_all_single(into, tensor, [6], [6], group=None, async_op=True)
        halo._all_gather(torch.empty_like(given), given, group=None)
    assert halo._all_gather is before
    for exchange in found:
        exchange()
    again = sent[3:]
    assert len(found) == 4
    assert [one.dtype for one in again] == [torch.float32, torch.float32, torch.int64]
    assert again[0] is again[1] is not sent[0]  # tensors of their own, kept from call to call


def test_exchanges_are_left_out_and_then_there_again(alone):
    dist, given, into = torch.distributed, torch.ones(4), torch.full((4,), 7.0)
    numbers = torch.full((4,), 7)
    with ranks.silent():
        assert dist.all_to_all_single(into, given, async_op=True).wait()
        assert halo._all_gather(into, given, async_op=True).wait()
        dist.all_to_all_single(numbers, given.long())
        dist.all_reduce(given)
    assert into.tolist() == [7.0] * 4
    assert numbers.tolist() == [1] * 4  # what may be a row or a column is the right one
    dist.all_to_all_single(into, given)
    assert into.tolist() == [1.0] * 4


def step_row(graph, order, model, ranks, **figures):
    row = {"graph": graph, "order": order, "model": model, "ranks": ranks, "case": "a"}
    return row | {"ms": 10.0, "predicted_ms": 9.0, "speed_up": 1.7, "peak_mib": 1.0} | figures


def targets_of(row, limits=training.STEPS, device="cuda"):
    """The targets of a case by what its figures are called after the case."""
    found = [one for limit in limits for one in limit.targets([row], device)]
    return {one.name.removeprefix("a "): one for one in found}


def limits_of(row, device="cuda"):
    return {k: one.limit for k, one in targets_of(row, device=device).items() if one.limit}


BOTH = ("reddit", "community"), ("products", "shuffled")
STATED = [((*of, "sage", 2), {"speed_up": 1.8, "hidden": 0.5}) for of in BOTH]
STATED += [((*of, "sage", 4), {"speed_up": 3.2}) for of in BOTH]
STATED += [((*BOTH[0], model, 2), {}) for model in ("gat", "maxk")]
STATED += [((*BOTH[0], model, 4), {"speed_up": at}) for model, at in (("gat", 3.0), ("maxk", 2.6))]


@pytest.mark.parametrize(("case", "limits"), STATED)
def test_targets_are_those_that_are_stated(case, limits):
    row = step_row(*case, hidden=0.6, off=1.1)
    assert limits_of(row) == limits | {"off": 1.15}
    assert limits_of(row, "cpu") == {}


def test_other_orders_and_ranks_are_reported_without_further_targets():
    own = limits_of(step_row("products", "community", "sage", 2, hidden=0.6))
    assert own == {"speed_up": 1.8, "hidden": 0.5}
    assert limits_of(step_row("products", "community", "sage", 4, hidden=0.6)) == {}
    assert limits_of(step_row("reddit", "community", "sage", 3)) == {}
    assert limits_of(step_row("flickr", "community", "sage", 4)) == {}


@pytest.mark.parametrize(
    ("predicted", "right"), [(8.6, False), (8.8, True), (11.4, True), (11.6, False)]
)
def test_a_prediction_may_be_as_far_off_either_way(predicted, right):
    row = step_row("reddit", "community", "gat", 2, predicted_ms=predicted, silent_ms=9.0)
    row |= training._ratios(row | {"exchange_ms": 2.0}, 17.0)
    assert targets_of(row)["off"].ok is right
    assert row["hidden"] == pytest.approx(0.5)


def test_one_rank_and_bytes_are_judged():
    alone = step_row("reddit", "community", "sage", 1, over_plain=1.05)
    assert not targets_of(alone)["over_plain"].ok
    few = {"case": "a", "over_predicted": 2.0, "over_dense": math.nan}
    assert [one.ok for one in targets_of(few, training.EXCHANGE).values()] == [True, False]


def test_the_page_has_the_tables_of_the_results_that_are_kept(tmp_path, monkeypatch):
    page, written = table.PAGE.read_text(encoding="utf-8"), tmp_path / "scaling.md"
    written.write_text(page, encoding="utf-8")
    monkeypatch.setattr(table, "PAGE", written)
    table.write(RESULTS)
    assert written.read_text(encoding="utf-8") == page, "python -m benchmarks distributed --table"
    table.PAGE.write_text("text", encoding="utf-8")
    with pytest.raises(SystemExit, match="lacks the lines <!-- begin: measured"):
        table.write(RESULTS)


@pytest.mark.slow
def test_training_over_ranks_is_measured(tmp_path):
    arguments = ["--device", "cpu", "--ranks", "1,2", "--graphs", "small", "--quick"]
    assert distributed.main([*arguments, "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "distributed-cpu.json").read_text())["sections"]
    assert set(kept) == {"bandwidth", "steps", "exchange"}
    one, two = kept["steps"]["rows"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert max(one["error"], two["error"]) < 1e-6
    positive = two["link"]["bandwidth"], two["machine"]["gathered"], two["ms"], two["silent_ms"]
    assert min(*positive, two["exchange_ms"], two["predicted_ms"]) > 0
    (sent,) = kept["exchange"]["rows"]
    assert sent["predicted_mib"] <= sent["sent_mib"] < 1.25 * sent["predicted_mib"]
    assert sent["halo"] <= 1000
