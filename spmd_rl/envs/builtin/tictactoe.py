"""Noughts and crosses: the policy against itself on two seats, or on one seat against random moves.

Each seat is a conversation of its own, and so a sample of its own: `Sample.agent` is `x` or `o`, and `Sample.reward`
its seat's: 1 for a win, 0.5 for a draw, 0 for a loss. An illegal move (any reply but the number of a free cell) ends
the game: 0 for who made it, and 0.5 for the other seat, which has beaten nobody.

The reward of an episode is the mean of the policy's seats. Against itself that says how often games end without an
illegal move, not how good they are; an evaluation of skill plays against random moves (`opponent = "random"`).

Invariants: x begins and seats take turns; what a random opponent does follows from the task and the board alone.
"""

from __future__ import annotations

import re

import numpy as np

from spmd_rl.envs.builtin.answers import whole_number
from spmd_rl.envs.builtin.arguments import check_choice, check_number, check_share
from spmd_rl.envs.builtin.conversation import Style
from spmd_rl.envs.builtin.splits import Content, Listed
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.protocol import Policy, Split, Tokenizer
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
ROWS = re.compile(r"[xo.]{3}\n[xo.]{3}\n[xo.]{3}")
DRAW = "."
OTHER = {"x": "o", "o": "x"}


class TicTacToe:
    """`tictactoe x` and three rows, such as `..o`, each in a line of its own → `5`: cells are 1 to 9, row by row."""

    RULES = (
        "You play noughts and crosses. The board is three rows; its cells are numbered 1 to 9, row by row, and a dot "
        "is a free one. Answer with the number of the cell you take, and nothing else."
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        opponent: str = "self",
        opening: int = 2,
        wrong: float = 0.0,
        heldout: float = 0.1,
        chat: bool = True,
        rules: bool = False,
        max_tokens: int = 3,
    ) -> None:
        """`opponent`: self or random; `opening`: moves that are already on the board, 0 to 3 (0: there is one task, so
        nothing is held out); `wrong`: share of the teacher's moves that are random; `max_tokens`: of one move."""
        self.source = "tictactoe" if opponent == "self" else "tictactoe_random"
        check_choice(self.source, "opponent", opponent, ("self", "random"))
        check_number(self.source, "opening", opening, 0, 3)
        check_share(self.source, "wrong", wrong)
        self._style = Style(tokenizer, chat, self.RULES if rules else "", max_tokens)
        self._seats, self._wrong = ("xo",) if opponent == "self" else ("x", "o"), wrong
        contents: list[Content] = [{"board": b, "seats": s} for b in openings(opening) for s in self._seats]
        self._tasks = Listed(self.source, seed, heldout, contents, lambda content: content["board"])
        self._values: dict[str, float] = {}  # of boards, for the teacher

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0: a board, and which seats are the policy's. ValueError where there is none."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]: what the seat hears that moves first, of the policy's."""
        board = task.data["board"]
        seat = mover(board) if mover(board) in task.data["seats"] else OTHER[mover(board)]
        if seat != mover(board):
            board = take(board, self._random_move(task, board))
        return self._sit(None, seat, board).prompt()

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One game."""
        board, chats, illegal = task.data["board"], dict[str, Chat](), ""
        while not illegal and not winner(board):
            seat = mover(board)
            if seat not in task.data["seats"]:
                board = take(board, self._random_move(task, board))
                continue
            if seat in chats:
                chats[seat].user(drawn(board))
            else:
                chats[seat] = self._sit(policy, seat, board)
            reply = await chats[seat].reply()
            cell = whole_number(reply.text) if reply.stop_reason == "stop" else None
            if cell is not None and 1 <= cell <= 9 and board[cell - 1] == ".":
                board = take(board, cell - 1)
            else:
                illegal = seat
        return self._ended(task, chats, winner(board), illegal)

    def _sit(self, policy: Policy | None, seat: str, board: str) -> Chat:
        """A seat's conversation, and what it hears first."""
        chat = self._style.begin(policy, agent=seat)
        chat.user(f"tictactoe {seat}\n{drawn(board)}")
        return chat

    def _ended(self, task: Task, chats: dict[str, Chat], won: str, illegal: str) -> Episode:
        rewards = {seat: reward_of(seat, won, illegal) for seat in chats}
        samples = tuple(sample for seat, chat in chats.items() for sample in chat.samples(rewards[seat]))
        statuses = {chat.status for chat in chats.values()}
        if "failed" in statuses:
            return Episode(task, samples, RewardError("a reply was aborted"), "failed")
        reward = Reward(sum(rewards.values()) / len(rewards), rewards | {"illegal": float(illegal != "")})
        return Episode(task, samples, reward, "truncated" if "truncated" in statuses else "ok")

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """A best move for the last board heard, any of them; a random free cell with probability `wrong`."""
        board = ROWS.findall(heard[-1])[-1].replace("\n", "")
        cells = free(board)
        if rng.random() >= self._wrong:
            worth = [-self._value(take(board, cell)) for cell in cells]
            cells = [cell for cell, w in zip(cells, worth, strict=True) if w == max(worth)]
        return str(cells[rng.integers(len(cells))] + 1)

    def _value(self, board: str) -> float:
        """1 where who moves next wins, -1 where the other does, 0 for a draw, both playing their best."""
        if board not in self._values:
            if won := winner(board):
                self._values[board] = 0.0 if won == DRAW else -1.0
            else:
                self._values[board] = max(-self._value(take(board, cell)) for cell in free(board))
        return self._values[board]

    def _random_move(self, task: Task, board: str) -> int:
        cells = free(board)
        return cells[np.random.default_rng([task.index, len(cells)]).integers(len(cells))]


def reward_of(seat: str, won: str, illegal: str) -> float:
    """Of one seat. `won`: x, o, a draw, or "" for a game without an end; `illegal`: who made an illegal move, or ""."""
    if illegal:
        return 0.0 if illegal == seat else 0.5
    return 0.5 if won == DRAW else float(won == seat)


def winner(board: str) -> str:
    """x, o, DRAW, or "" while the game goes on."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return "" if "." in board else DRAW


def mover(board: str) -> str:
    """Whose turn it is."""
    return "x" if board.count("x") == board.count("o") else "o"


def free(board: str) -> list[int]:
    """The cells 0 to 8 that nobody has taken."""
    return [cell for cell in range(9) if board[cell] == "."]


def take(board: str, cell: int) -> str:
    """The board after who moves next has taken the cell."""
    return board[:cell] + mover(board) + board[cell + 1 :]


def drawn(board: str) -> str:
    """Three rows."""
    return f"{board[:3]}\n{board[3:6]}\n{board[6:]}"


def openings(moves: int) -> list[str]:
    """All boards after so many moves."""
    boards = {"." * 9}
    for _ in range(moves):
        boards = {take(board, cell) for board in boards for cell in free(board)}
    return sorted(boards)
