"""The scheduler of a fleet, alone: whatever nodes come, go and answer, each group counts once."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from repl_rl.ray.worker_pool import GroupAttempt, GroupScheduler

WITHIN_S = 100.0


class Days(RuleBasedStateMachine):
    """A batch among nodes that do what dice say."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [1 + 5 * n % 7 for n in range(12)]
        self.schedule = GroupScheduler(self.sizes, WITHIN_S)
        self.places: dict[str, int] = {}
        self.under_way: list[GroupAttempt] = []
        self.late: list[GroupAttempt] = []
        self.first_begun: list[int] = []
        self.counted: list[int] = []
        self.now_s = 0.0

    @rule(places=st.integers(1, 12))
    def join(self, places: int) -> None:
        name = f"node {len(self.first_begun)} {self.now_s} {len(self.places)} {places}"
        if name not in self.places:
            self.places[name] = places
            self.schedule.add_worker(name, places)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.places)))
        del self.places[name]
        lost = [attempt for attempt in self.under_way if attempt.worker == name]
        assert set(self.schedule.remove_worker(name)) == set(lost)
        self.under_way = [attempt for attempt in self.under_way if attempt not in lost]
        self.late += lost
        self.now_s += 1

    @rule(sizes=st.lists(st.integers(1, 7), max_size=3))
    def add(self, sizes: list[int]) -> None:
        assert list(self.schedule.add(sizes)) == list(range(len(self.sizes), len(self.sizes) + len(sizes)))
        self.sizes += sizes

    @rule()
    def assign(self) -> None:
        self.now_s += 1
        for attempt in self.schedule.assign_groups(self.now_s):
            assert attempt.worker in self.places
            assert attempt.group not in self.counted
            if attempt.number == 1:
                self.first_begun.append(attempt.group)
            self.under_way.append(attempt)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove(attempt)
        assert self.schedule.finish(attempt)
        self.counted.append(attempt.group)
        self.late.append(attempt)  # a second answer is late too

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        assert not self.schedule.finish(data.draw(st.sampled_from(self.late)))

    @invariant()
    def groups_are_begun_in_order(self) -> None:
        assert self.first_begun == list(range(len(self.first_begun)))

    @invariant()
    def nothing_counts_twice_and_nothing_is_lost(self) -> None:
        assert len(set(self.counted)) == len(self.counted)
        running = {attempt.group for attempt in self.under_way}
        assert set(self.schedule.running) == running
        assert self.schedule.waiting_count + len(running) + len(self.counted) == len(self.sizes)
        assert self.schedule.is_finished == (len(self.counted) == len(self.sizes))

    @invariant()
    def no_node_has_more_than_it_has_room_for(self) -> None:
        for name, places in self.places.items():
            held = [self.sizes[attempt.group] for attempt in self.under_way if attempt.worker == name]
            assert sum(held) <= places or len(held) == 1

    @invariant()
    def what_takes_too_long_is_told(self) -> None:
        due = {attempt for attempt in self.under_way if attempt.due_s <= self.now_s}
        assert set(self.schedule.find_overdue(self.now_s)) == due


TestDays = Days.TestCase
TestDays.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(1, 9), max_size=30), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_every_batch_comes_to_its_end_while_one_node_is_there(sizes: list[int], places: list[int]) -> None:
    schedule = GroupScheduler(sizes, WITHIN_S)
    for number, room in enumerate(places):
        schedule.add_worker(f"node {number}", room)
    played: list[int] = []
    while not schedule.is_finished:
        begun = list(schedule.assign_groups(0.0))
        assert begun or schedule.running
        attempt = next(iter(schedule.running.values()))
        assert schedule.finish(attempt)
        played.append(attempt.group)
    assert sorted(played) == list(range(len(sizes)))


def test_a_group_goes_where_most_room_is() -> None:
    schedule = GroupScheduler([2, 2, 2], WITHIN_S)
    schedule.add_worker("small", 2)
    schedule.add_worker("large", 5)
    assert [attempt.worker for attempt in schedule.assign_groups(0.0)] == ["large", "large", "small"]


def test_each_attempt_at_a_group_has_a_number_of_its_own() -> None:
    schedule = GroupScheduler([1, 1], WITHIN_S)
    for number in range(4):
        schedule.add_worker(f"node {number}", 1)
        (attempt,) = schedule.assign_groups(0.0)
        assert attempt == GroupAttempt(0, number + 1, f"node {number}", WITHIN_S)
        assert schedule.remove_worker(f"node {number}") == [attempt]
