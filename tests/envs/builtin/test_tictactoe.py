"""Noughts and crosses: two seats, their rewards, illegal moves, a teacher that never loses, chance as an opponent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.builtin.tictactoe import DRAW, ROWS, TicTacToe, free, mover, openings, take, winner
from spmd_rl.envs.demonstrate import Demonstrator
from spmd_rl.rollouts.types import Episode, Task
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

EMPTY = "." * 9


def made(**knobs: Any) -> TicTacToe:
    return TicTacToe(byte_tokenizer(), 0, **knobs)


def play(said: Any, seats: str = "xo", board: str = EMPTY, index: int = 0, **knobs: Any) -> tuple[Episode, Any]:
    policy = ScriptedPolicy(byte_tokenizer(), said)
    task = Task("tictactoe", index, {"board": board, "seats": seats})
    return asyncio.run(made(**knobs).rollout(task, policy)), policy


def rewards(episode: Episode) -> dict[str, float | None]:
    return {sample.agent: sample.reward for sample in episode.samples}


def best(env: TicTacToe, task: Task, seed: int = 0) -> Episode:
    teacher = Demonstrator(byte_tokenizer(), env, task, np.random.default_rng(seed))
    return asyncio.run(env.rollout(task, teacher))


def lines(moves: str) -> Callable[[str], str]:
    """A policy that takes the first free cell of these, whichever seat it sits on."""

    def move(prompt: str) -> str:
        board = ROWS.findall(prompt)[-1].replace("\n", "")
        return next(move for move in moves if board[int(move) - 1] == ".")

    return move


def test_a_game_that_x_wins() -> None:
    episode, policy = play(["1", "4", "2", "5", "3"], chat=False)
    assert policy.prompts[0] == "<|im_start|>tictactoe x\n...\n...\n...\n"
    assert policy.prompts[1] == "<|im_start|>tictactoe o\nx..\n...\n...\n"
    assert policy.prompts[4] == (
        "<|im_start|>tictactoe x\n...\n...\n...\n1<|im_end|><|im_start|>x..\no..\n...\n2<|im_end|>"
        "<|im_start|>xx.\noo.\n...\n"
    )
    assert rewards(episode) == {"x": 1.0, "o": 0.0}
    assert (episode.reward.value, episode.status) == (0.5, "ok")
    assert episode.reward.parts == {"x": 1.0, "o": 0.0, "illegal": 0.0}


def test_a_game_that_o_wins_and_one_that_nobody_does() -> None:
    assert rewards(play(["1", "4", "2", "5", "9", "6"])[0]) == {"x": 0.0, "o": 1.0}
    draw, _ = play(["5", "1", "3", "7", "4", "6", "2", "8", "9"])
    assert rewards(draw) == {"x": 0.5, "o": 0.5}


@pytest.mark.parametrize("said", ["1", "0", "10", "-1", "x", "²", "", "5 6"])
def test_an_illegal_move_loses_and_earns_the_other_no_win(said: str) -> None:
    episode, policy = play(["1", said])
    assert rewards(episode) == {"x": 0.5, "o": 0.0}
    assert (len(policy.asked), episode.reward.value) == (2, 0.25)
    assert episode.reward.parts["illegal"] == 1


def test_a_seat_that_never_moved_has_no_sample() -> None:
    episode, _ = play([Said("1", "length")])
    assert rewards(episode) == {"x": 0.0}
    assert (episode.status, episode.reward.value) == ("truncated", 0.0)


@given(st.lists(st.integers(0, 8), max_size=9, unique=True))
def test_the_rules(cells: list[int]) -> None:
    board = EMPTY
    for cell in cells:
        assert mover(board) == "xo"[len(free(board)) % 2 == 0]
        board = take(board, cell)
    assert sorted(set(range(9)) - set(cells)) == free(board)
    grid = np.array(list(board)).reshape(3, 3)
    rows = [*grid, *grid.T, grid.diagonal(), np.fliplr(grid).diagonal()]
    full = {row[0] for row in rows if len(set(row)) == 1} - {"."}
    expected = full or ({DRAW} if len(cells) == 9 else {""})
    assert winner(board) in expected


def test_openings_are_all_boards_after_so_many_moves() -> None:
    assert [len(openings(n)) for n in range(4)] == [1, 9, 72, 252]
    env = made(opening=3)
    boards = [env.task(i, "train").data["board"] for i in range(300)]
    assert all(board.count("x") == 2 and board.count("o") == 1 for board in boards)


def test_two_teachers_draw_from_the_empty_board() -> None:
    env = made(opening=0)
    for seed in range(10):
        assert rewards(best(env, env.task(seed, "train"), seed)) == {"x": 0.5, "o": 0.5}


def test_teachers_take_what_an_opening_gives_away() -> None:
    env = made()
    # x in a corner, o at the edge next to it: x wins.
    assert rewards(best(env, Task("", 0, {"board": "xo.......", "seats": "xo"}))) == {"x": 1.0, "o": 0.0}


@pytest.mark.parametrize("seat", ["x", "o"])
def test_a_teacher_never_loses_against_chance(seat: str) -> None:
    env = made(opponent="random", opening=0)
    values = [best(env, Task("", n, {"board": EMPTY, "seats": seat}), n).reward.value for n in range(60)]
    assert min(values) >= 0.5 and np.mean(values) > 0.8


def test_chance_beats_who_plays_badly() -> None:
    values = [play(lines("123456789"), "o", index=n, opponent="random")[0].reward.value for n in range(60)]
    assert 0.1 < np.mean(values) < 0.9


def test_what_chance_does_follows_from_the_task() -> None:
    first, again, other = (play(lines("987654321"), "o", index=n, opponent="random")[1].prompts for n in (3, 3, 4))
    assert first == again != other


def test_one_seat_makes_one_sample() -> None:
    env = made(opponent="random")
    tasks = [env.task(i, "train") for i in range(100)]
    assert {task.data["seats"] for task in tasks} == {"x", "o"}
    assert {task.source for task in tasks} == {"tictactoe_random"}
    for task in tasks[:10]:
        (sample,) = best(env, task).samples
        assert sample.agent == task.data["seats"]


def test_an_opening_is_on_one_side_for_both_seats() -> None:
    env = made(opponent="random", heldout=0.4)
    boards = {side: {env.task(i, side).data["board"] for i in range(500)} for side in ("train", "heldout")}
    assert not boards["train"] & boards["heldout"]
    assert len(boards["train"] | boards["heldout"]) == 72


def test_a_teacher_that_is_wrong_loses_sometimes() -> None:
    env = made(opponent="random", wrong=1.0, opening=0)
    values = [best(env, env.task(n, "train"), n).reward.value for n in range(60)]
    assert 0.2 < np.mean(values) < 0.8


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"opponent": "me"}, "opponent = 'me' must be one of self, random"),
        ({"opening": 4}, r"opening = 4 must lie in 0\.\.3"),
    ],
)
def test_bad_knobs_are_named(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(**knobs)
