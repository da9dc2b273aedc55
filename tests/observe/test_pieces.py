"""The text of every token: one piece each, and together exactly the text of all of them, whatever the tokens are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.models.byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from spmd_rl.observe.pieces import token_pieces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def as_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def words_without_leading_space(ids: list[int]) -> str:
    """As SentencePiece decodes: the space in front of the first word is lost, also when a token is decoded alone."""
    return "".join([" the", " cat", "s", " ", "", " sat"][i] for i in ids).removeprefix(" ")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["a", "b", "c"]),
        ("aé😀b", ["a", "", "é", "", "", "", "😀", "b"]),
        ("é", ["", "é"]),
        ("你好", ["", "", "你", "", "", "好"]),
        ("", []),
    ],
)
def test_a_character_goes_to_the_last_of_its_tokens(text, pieces):
    assert token_pieces(list(text.encode()), as_bytes) == pieces


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        (b"\xffa", ["�", "a"]),
        (b"\xe2\x82a", ["�", "", "a"]),  # the beginning of a character is one replacement for both of its bytes
        (b"a\xe2\x82", ["a", "�", ""]),
        (b"\xff\xff\xe4\xbd\xa0", ["�", "�", "", "", "你"]),
        ("a�b".encode(), ["a", "", "", "�", "b"]),  # the replacement character itself
    ],
)
def test_broken_characters_stay_where_they_are(content, pieces):
    got = token_pieces(list(content), as_bytes)
    assert "".join(got) == content.decode("utf-8", "replace")
    assert [p for p in got if p] == [p for p in pieces if p] and got[-1] == pieces[-1]


def test_lone_surrogates_of_a_decoder_are_no_characters_yet():
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "surrogateescape")

    assert token_pieces([*"aé".encode(), 0xFF], decode) == ["a", "", "é", "\udcff"]


def test_a_space_that_a_token_loses_alone_is_found_in_the_whole():
    assert token_pieces([0, 1, 2, 5], words_without_leading_space) == ["the", " cat", "s", " sat"]


def test_what_reads_otherwise_alone_does_not_spoil_what_follows():
    def decode(ids: list[int]) -> str:
        alone = ["x" * 20, "end", "."]
        return alone[ids[0]] if len(ids) == 1 else "".join(["y" * 20, "end", "."][i] for i in ids)

    assert token_pieces([0, 1, 2], decode) == ["", "y" * 20 + "end", "."]


def test_special_tokens_are_pieces(tokenizer):
    ids = tokenizer.encode("<|im_start|>é<tool_call>", add_special_tokens=False)
    assert token_pieces(ids, tokenizer.decode) == ["<|im_start|>", "", "é", "<tool_call>"]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
@settings(deadline=None)
def test_any_tokens_give_one_piece_each_and_together_the_text(tokenizer, ids):
    pieces = token_pieces(ids, tokenizer.decode)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_also_when_alone_and_together_differ(ids):
    pieces = token_pieces(ids, words_without_leading_space)
    assert len(pieces) == len(ids) and "".join(pieces) == words_without_leading_space(ids)


@given(st.text(max_size=40).filter(lambda text: "�" not in text and text.isprintable()))
def test_characters_of_a_proper_text_stay_whole_and_in_place(text):
    pieces = token_pieces(list(text.encode()), as_bytes)
    ends = [i for i, piece in enumerate(pieces) if piece]
    lengths = [len(c.encode()) for c in text]
    assert [pieces[i] for i in ends] == list(text)
    assert ends == [sum(lengths[: n + 1]) - 1 for n in range(len(text))]
