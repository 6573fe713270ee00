"""Ranks that differ, are missing or are there twice are refused by name; silent ones are seen."""

import threading
import time
from functools import partial

import pytest
import torch.distributed as dist
from ranks import free_port

from sparsefmt.distributed.job import launch
from sparsefmt.distributed.job.launch import Place, Watch, meet, place_of
from sparsefmt.errors import RankError

#: A watch ends its thread by an exception, where it would end the process.
ends_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def at_the_same_time(*calls):
    """Run each in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=one) for one in calls]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def meet_all(facts, sizes=None, ranks=None, timeout=20.0):
    """What each rank says that meets the others, in threads: "" for nothing."""
    port, said, stores = free_port(), {}, {}
    sizes, ranks = sizes or [len(facts)] * len(facts), ranks or range(len(facts))

    def run(number):
        place = Place(rank=ranks[number], ranks=sizes[number], port=port)
        try:
            stores[number] = meet(place, facts[number], timeout)[1]
            said[number] = ""
        except RankError as error:
            said[number] = str(error)

    at_the_same_time(*(partial(run, number) for number in range(len(facts))))
    return [said[number] for number in range(len(facts))]


SAME = {"sparsefmt": "1", "torch": "2", "partition": "abc", "--model": "gcn"}


def test_ranks_that_are_alike_meet():
    assert meet_all([SAME] * 3) == ["", "", ""]


@pytest.mark.parametrize("name", SAME)
def test_a_rank_that_differs_is_named_on_all_ranks(name):
    said = meet_all([SAME, SAME, SAME | {name: "other"}])
    assert len(set(said)) == 1
    assert said[0].startswith(f"rank 2 has {name} other and rank 0 has {SAME[name]}: ")


def test_ranks_that_do_not_fit_together_are_named():
    first, other = meet_all([SAME, SAME], sizes=[3, 2])
    said = "rank 1 has world size 2 and rank 0 has 3: start all with the same WORLD_SIZE."
    assert first == other == said
    first, second, third = meet_all([SAME] * 3, sizes=[2, 2, 3])  # a rank too many
    assert (first, second) == ("", "")
    assert "world size" in third or "rank 0 is gone" in third
    said = meet_all([SAME, {"fault": "parts: there is none."}])
    assert said == ["rank 1 cannot take part: parts: there is none."] * 2
    (said,) = meet_all([SAME], sizes=[2], timeout=0.5)
    assert said == "rank 1 did not come within 0.5 s: start all 2 ranks."
    said = meet_all([SAME] * 3, sizes=[2, 2, 2], ranks=[0, 1, 1])
    assert sum("rank 1 is there twice" in one for one in said) == 1


def test_nobody_to_meet_is_named():
    place = Place(rank=1, ranks=2, port=free_port())
    with pytest.raises(RankError, match=r"found no rank 0 at localhost:\d+ within 0.3 s"):
        meet(place, SAME, 0.3)


def test_a_port_that_is_taken_is_named():
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    with pytest.raises(RankError, match="MASTER_PORT that is free"):
        meet(Place(rank=0, ranks=2, port=store.port), SAME, 1.0)


@pytest.mark.parametrize(
    "changed",
    [{"RANK": "2"}, {"RANK": "-1"}, {"RANK": "x"}, {"MASTER_PORT": "0"}, {"WORLD_SIZE": ""}],
)
def test_a_place_that_cannot_be_is_refused(changed):
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    assert place_of(good) == Place(rank=1, ranks=2, local_rank=1, port=29500)
    with pytest.raises(RankError, match="RANK"):
        place_of(good | changed)


def test_a_process_without_torchrun_is_alone():
    place, _ = meet(place_of({}), SAME, 5.0)
    assert (place.rank, place.ranks) == (0, 1)
    with Watch(place, 5.0):
        pass


class Told(Watch):
    """A watch that keeps what it would say, in the place of ending the process."""

    said = ""

    def _end(self, sentence):
        self.said = self.said or sentence
        raise SystemExit  # of the thread alone


@pytest.fixture
def places():
    """Three ranks that have met, and their store."""
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    places = [Place(rank=rank, ranks=3, port=store.port, by_agent=True) for rank in range(3)]
    first = places[0].connect(5.0)
    for rank in range(3):
        first.set(f"beat/{rank}", "0")
    return places, store


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def watching(places, timeout, steps=()):
    """Watches that have begun, whose main threads have got so far."""
    watches = [Told(place, timeout) for place in places]
    for one, done in zip(watches, steps, strict=False):
        one.progress = lambda done=done: done
    for one in watches:
        one.__enter__()
    return watches


@ends_a_thread
def test_a_silent_rank_is_named_by_all_others(places):
    watches = watching(places[0][:2], 4.0)
    begun = time.monotonic()
    assert until(lambda: all(one.said for one in watches))
    assert 1.5 < time.monotonic() - begun < 4.0
    assert watches[0].said == watches[1].said
    assert watches[0].said.startswith("rank 2 is gone: no sign of it for 2.")


@pytest.fixture
def patience(monkeypatch):
    """Let ranks beat now or later."""
    monkeypatch.setattr(launch, "_PATIENCE", 60.0)


@ends_a_thread
@pytest.mark.parametrize(
    ("steps", "who"),
    [
        ([(1, 7), (1, 6), (1, 7)], "rank 1 stands still: no progress for 1."),
        ([(2, 7), (2, 7), (1, 9)], "rank 2 stands still: no progress for 1."),
        ([(1, 7), (1, 7), (1, 7)], "ranks 0, 1, 2 stand still: no progress for 1."),
    ],
)
def test_a_main_thread_that_stands_still_is_named_on_all_ranks(places, steps, who, patience):
    begun = time.monotonic()
    watches = watching(places[0], 1.0, steps)
    assert until(lambda: all(one.said for one in watches))
    assert time.monotonic() - begun < 6.0
    assert len({one.said for one in watches}) == 1
    assert watches[0].said.startswith(who)
    assert "--resume" in watches[0].said


def test_a_first_epoch_and_slow_epochs_may_take_longer(places, patience):
    watches = watching(places[0], 0.5, [(0, 3), (0, 2), (0, 3)])
    time.sleep(1.5)  # kernels compile
    for one in watches:
        one.progress = lambda: (1, 9)
    time.sleep(1.2)  # as long as before, and twice the timeout
    at_the_same_time(*(partial(one.__exit__, None, None, None) for one in watches))
    assert not [one.said for one in watches if one.said]


@ends_a_thread
def test_an_error_of_one_rank_is_told_to_all_others(places):
    watches = watching(places[0], 10.0)
    with pytest.raises(SystemExit):
        watches[1].__exit__(RankError, RankError("no disk"), None)
    assert until(lambda: all(one.said for one in watches))
    assert {one.said for one in watches} == {"rank 1 failed: RankError: no disk"}


@ends_a_thread
def test_a_failed_collective_names_the_rank_that_is_silent(places, capsys):
    watches = watching(places[0][:2], 10.0)
    error = RuntimeError("Connection closed by peer")
    begun = time.monotonic()
    thread = threading.Thread(target=lambda: watches[0].__exit__(RuntimeError, error, None))
    thread.start()
    assert until(lambda: all(one.said for one in watches))
    assert time.monotonic() - begun < 4.5  # half of the timeout would be 5
    assert {one.said[:14] for one in watches} == {"rank 2 is gone"}
    thread.join()


def test_ranks_leave_together(places):
    watches = [Told(place, 10.0) for place in places[0]]
    left = []

    def run(one, seconds):
        with one:
            time.sleep(seconds)
        left.append(time.monotonic())

    at_the_same_time(*(partial(run, one, 0.3 * number) for number, one in enumerate(watches)))
    assert not [one.said for one in watches if one.said]
    assert max(left) - min(left) < 1.0
