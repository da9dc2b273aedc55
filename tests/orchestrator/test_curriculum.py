"""Which task comes next: in order, or by how hard the tasks are; and it goes on where it was."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config.tasks import PoolConfig, SourceConfig
from spmd_rl.orchestrator.curriculum import Cyclic, DifficultyPool, make_curriculum


def draw(curriculum, solved=lambda index: 0.5, count: int = 1) -> list[int]:
    """Draw tasks, each judged at once."""
    drawn = []
    for _ in range(count):
        index = curriculum.next()
        curriculum.drew(index)
        curriculum.ended(index, solved(index))
        drawn.append(index)
    return drawn


def test_cyclic_counts() -> None:
    assert draw(Cyclic(), count=4) == [0, 1, 2, 3]
    assert isinstance(make_curriculum(SourceConfig(curriculum="cyclic")), Cyclic)
    assert isinstance(make_curriculum(SourceConfig(curriculum="difficulty_pool")), DifficultyPool)


def test_all_tasks_are_tried_before_one_comes_again() -> None:
    assert sorted(draw(DifficultyPool(PoolConfig(tasks=7)), count=7)) == list(range(7))


def test_levels_are_drawn_by_their_shares() -> None:
    """Of 30 tasks 10 are too easy and 10 too hard."""
    pool = DifficultyPool(PoolConfig(tasks=30, easy_share=0.1, hard_share=0.2))
    rewards = {0: 1.0, 1: 0.0, 2: 0.5}
    draw(pool, lambda index: rewards[index % 3], 100)  # by now the level of every task is known
    drawn = Counter(index % 3 for index in draw(pool, lambda index: rewards[index % 3], 300))
    assert abs(drawn[0] - 30) <= 2
    assert abs(drawn[1] - 60) <= 2


def test_a_task_that_changes_its_difficulty_changes_its_level() -> None:
    pool = DifficultyPool(PoolConfig(tasks=2, easy_share=0.0, hard_share=0.0))
    draw(pool, lambda index: float(index == 0), 2)
    assert pool.state()["queues"] == {"medium": [], "easy": [0], "hard": [1]}
    pool.ended(0, 0.5)
    pool.ended(1, 1.0)
    assert pool.state()["queues"] == {"medium": [0], "easy": [1], "hard": []}


def test_tasks_of_a_level_without_a_share_rest_while_there_are_others() -> None:
    pool = DifficultyPool(PoolConfig(tasks=4, easy_share=0.0, hard_share=0.0))
    draw(pool, lambda index: float(index == 3), 4)
    pool.ended(0, 0.5)
    assert set(draw(pool, lambda index: 0.5, 6)) == {0}


events = st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=60)


@given(tasks=st.integers(1, 9), before=events, after=events, shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)))
def test_it_goes_on_where_it_was_and_draws_only_tasks_of_the_pool(tasks, before, after, shares) -> None:
    config = PoolConfig(tasks=tasks, easy_share=shares[0], hard_share=shares[1])

    def play(pool: DifficultyPool, moves) -> list[int]:
        drawn = []
        for judged, reward in moves:
            drawn.append(pool.next())
            assert pool.next() == drawn[-1], "asking changes nothing"
            pool.drew(drawn[-1])
            if judged:
                pool.ended(drawn[-1], reward)
        return drawn

    pool, again = DifficultyPool(config), DifficultyPool(config)
    play(pool, before)
    again.restore(pool.state())
    drawn = play(pool, after)
    assert drawn == play(again, after)
    assert pool.state() == again.state()
    assert all(0 <= index < tasks for index in drawn)
    queues = pool.state()["queues"].values()
    assert sorted(index for queue in queues for index in queue) == list(range(tasks)), "every task on one level"
