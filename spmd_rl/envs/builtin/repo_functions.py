"""The longer functions that small repositories are made of, each with places for bugs.

It refuses to know how they are put together. Invariants: those of `repo_pieces.py`.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from spmd_rl.envs.builtin.repo_pieces import Draw, Piece

WORDS = ["red", "green", "apple", "pear", "plum", "Anna", "Otto", "level", "noon", "river", "stone", "a", "of", "x"]


def _piece(source: str, arguments: Draw) -> Piece:
    name, parameters = re.match(r"def (\w+)\((.*)\):", source).groups()
    return Piece(name, parameters, source, arguments)


def _ints(chance: Random) -> list[Any]:
    return [[chance.randint(-9, 20) for _ in range(chance.randint(2, 7))]]


def _ints_and(low: int, high: int) -> Draw:
    return lambda chance: [*_ints(chance), chance.randint(low, high)]


def _ints_and_one_of_them(chance: Random) -> list[Any]:
    (values,) = _ints(chance)
    return [values, chance.choice(values)]


def _words(chance: Random) -> list[Any]:
    return [" ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 6)))]


def _word_list(chance: Random) -> list[Any]:
    return [[chance.choice(WORDS) for _ in range(chance.randint(2, 7))]]


def _words_and(low: int, high: int) -> Draw:
    return lambda chance: [*_words(chance), chance.randint(low, high)]


def _rows(chance: Random) -> list[Any]:
    width = chance.randint(2, 4)
    return [[[chance.randint(0, 9) for _ in range(width)] for _ in range(width + chance.randint(1, 2))]]


def _words_and_width(chance: Random) -> list[Any]:
    (text,) = _words(chance)
    return [text, max(4, len(text) + chance.choice([-5, -1, 0, 1]))]


def _perhaps_palindrome(chance: Random) -> list[Any]:
    return [chance.choice(["Anna", "Otto", "noon", "a b a", "Level", "ab", "river", "x", *_words(chance)])]


def _two_spans(chance: Random) -> list[Any]:
    return [time for _ in range(2) for time in sorted(chance.sample(range(20), 2))]


def _year(chance: Random) -> list[Any]:
    centuries = [1600, 1700, 1800, 1900, 2000, 2100, 2200, 2400]
    return [chance.choice([*centuries, chance.randint(1900, 2100), 4 * chance.randint(480, 520)])]


LONG = [
    _piece(
        '''def clamp(value, low, high):
    """The number nearest to value that lies between low and high."""
    return ‹max(low, min(value, high))|min(low, max(value, high))|max(high, min(value, low))›
''',
        lambda chance: [chance.randint(-20, 20), chance.randint(-9, 0), chance.randint(1, 9)],
    ),
    _piece(
        '''def mean(values):
    """The average, rounded down; 0 for no values."""
    if not values:
        return 0
    return sum(values) // ‹len(values)|(len(values) - 1)|2›
''',
        _ints,
    ),
    _piece(
        '''def count_above(values, limit):
    """How many values are greater than limit."""
    count = ‹0|1|-1›
    for value in values:
        if value ‹>|>=|<› limit:
            count += ‹1|value|2›
    return count
''',
        _ints_and_one_of_them,
    ),
    _piece(
        '''def running_totals(values):
    """The sum of all values up to each one."""
    total = ‹0|1|values[0]›
    totals = []
    for value in values:
        total ‹+=|-=|=› value
        totals.append(‹total|value|total + value›)
    ‹return totals|totals|return total›
''',
        _ints,
    ),
    _piece(
        '''def factorial(number):
    """The product of all numbers from 1 to number."""
    product = ‹1|0|2›
    for factor in range(2, ‹number + 1|number|number + 2›):
        product ‹*=|+=|=› factor
    return product
''',
        lambda chance: [chance.randint(0, 12)],
    ),
    _piece(
        '''def is_leap_year(year):
    """Whether the year has 366 days."""
    if year % ‹400|4000|40› == 0:
        return True
    return year % 4 == 0 ‹and|or|and not› year % 100 ‹!=|==|<› 0
''',
        _year,
    ),
    _piece(
        '''def digit_sum(number):
    """The sum of the decimal digits of a number that is not negative."""
    total = 0
    while number > 0:
        total += number % ‹10|9|100›
        number //= 10
    ‹return total|total|return number›
''',
        lambda chance: [chance.randint(0, 99999)],
    ),
    _piece(
        '''def greatest_divisor(a, b):
    """The greatest number that divides both."""
    while b:
        a, b = b, a % b
    return ‹a|b|a + 1›
''',
        lambda chance: [chance.randint(1, 60), chance.randint(1, 60)],
    ),
    _piece(
        '''def second_largest(values):
    """The largest value but one; equal values count once. None where there is none."""
    ordered = sorted(‹set(values)|values|set(values[1:])›)
    if len(ordered) ‹< 2|< 3|<= 2›:
        return None
    return ordered[‹-2|-1|1›]
''',
        lambda chance: [[chance.randint(0, 5) for _ in range(chance.randint(2, 6))]],
    ),
    _piece(
        '''def median(values):
    """The value in the middle; of two, the larger one."""
    ordered = ‹sorted(values)|values|sorted(values)[1:]›
    return ordered[‹len(ordered) // 2|len(ordered) // 2 - 1|len(ordered) // 3›]
''',
        _ints,
    ),
    _piece(
        '''def discounted(price, percent):
    """The price after a discount of so many percent, rounded up."""
    return price ‹-|+|*› price * ‹percent|(percent + 1)|(100 - percent)› // 100
''',
        lambda chance: [chance.randint(10, 900), chance.randint(1, 90)],
    ),
    _piece(
        '''def overlap(start_a, end_a, start_b, end_b):
    """How long two spans of time have in common."""
    start = ‹max(start_a, start_b)|min(start_a, start_b)|start_b›
    end = ‹min(end_a, end_b)|max(end_a, end_b)|end_a›
    return max(‹0|1|-9›, end - start)
''',
        _two_spans,
    ),
    _piece(
        '''def initials(name):
    """The first letter of every word, in capitals."""
    return "".join(word[‹0|-1|:2›] for word in name.split())‹.upper()|.lower()|.title()›
''',
        _words,
    ),
    _piece(
        '''def is_palindrome(text):
    """Whether its letters read the same backwards; capitals, spaces and signs don't matter."""
    letters = [letter for letter in ‹text.lower()|text|text.lower()[1:]› if letter.isalpha()]
    return letters ‹==|!=|>=› letters[::-1]
''',
        _perhaps_palindrome,
    ),
    _piece(
        '''def count_words(text):
    """How many words there are."""
    return ‹len(text.split())|text.count(" ")|len(text)›
''',
        _words,
    ),
    _piece(
        '''def shifted(text, steps):
    """Every small letter replaced by the one so many steps on in the alphabet; z goes on with a."""
    result = ""
    for letter in text:
        if "a" <= letter ‹<=|>|==› "z":
            place = (ord(letter) - ord("a") ‹+|-|*› steps) % ‹26|25|10›
            letter = chr(place + ord("a"))
        result ‹+=|=|+= " " +› letter
    return result
''',
        _words_and(1, 25),
    ),
    _piece(
        '''def shortened(text, width):
    """The text, or where it is longer than width its beginning and three dots, width characters in all."""
    if len(text) ‹<=|<|>› width:
        return text
    return text[: width ‹- 3|+ 3|- 2›] + "..."
''',
        _words_and_width,
    ),
    _piece(
        '''def count_vowels(text):
    """How many letters are vowels, small or capital."""
    return sum(letter in "‹aeiou|aeio|aiou›" for letter in ‹text.lower()|text|text.upper()›)
''',
        _words,
    ),
    _piece(
        '''def padded(text, width):
    """The text with zeros before it, width characters long."""
    return ‹"0" * (width - len(text)) + text|text + "0" * (width - len(text))|"0" * width + text›
''',
        lambda chance: [str(chance.randint(1, 999)), chance.randint(4, 8)],
    ),
    _piece(
        '''def minutes(time):
    """The minutes since midnight at a time such as 9:05."""
    hour, minute = time.split(":")
    return int(‹hour|minute|hour[0]›) * ‹60|100|24› ‹+|-|*› int(minute)
''',
        lambda chance: [f"{chance.randint(0, 23)}:{chance.randint(1, 59):02}"],
    ),
    _piece(
        '''def chunks(values, size):
    """The values in lists of so many; the last one may be shorter."""
    return [values[start : start + ‹size|size - 1|size + 1›] for start in range(0, len(values), ‹size|size + 1|1›)]
''',
        _ints_and(2, 4),
    ),
    _piece(
        '''def rotated(values, steps):
    """The values with the first ones, so many, moved to the end."""
    steps %= ‹len(values)|2|(len(values) + 1)›
    return ‹values[steps:] + values[:steps]|values[:steps] + values[steps:]|values[-steps:] + values[:-steps]›
''',
        _ints_and(1, 9),
    ),
    _piece(
        '''def unique(values):
    """Every value once, in the order in which they come first."""
    seen = []
    for value in values:
        if value ‹not in seen|in seen|!= seen›:
            seen.append(value)
    ‹return seen|seen|return values›
''',
        lambda chance: [[chance.randint(0, 4) for _ in range(chance.randint(3, 8))]],
    ),
    _piece(
        '''def transposed(rows):
    """Columns as rows."""
    width = ‹len(rows[0])|len(rows)|len(rows[0]) - 1›
    return [[row[‹column|0|column - 1›] for row in rows] for column in range(width)]
''',
        _rows,
    ),
    _piece(
        '''def position_of_largest(values):
    """Where the largest value stands first, counted from 0."""
    best = 0
    for position, value in enumerate(values):
        if value ‹>|>=|<› values[‹best|0|position - 1›]:
            best = ‹position|value|best + 1›
    return best
''',
        lambda chance: [[chance.randint(0, 6) for _ in range(chance.randint(3, 8))]],
    ),
    _piece(
        '''def differences(values):
    """What each value is greater than the one before it."""
    return [‹b - a|a - b|b + a› for a, b in zip(values, values[‹1:|:|2:›])]
''',
        _ints,
    ),
    _piece(
        '''def counts(words):
    """How often each word comes."""
    found = {}
    for word in words:
        found[word] = found.get(word, ‹0|1|-1›) + ‹1|2|len(word)›
    ‹return found|found|return words›
''',
        _word_list,
    ),
    _piece(
        '''def longest(words):
    """The longest word, the first of several."""
    best = words[0]
    for word in words:
        if len(word) ‹>|>=|<› len(‹best|words[0]|words[-1]›):
            best = word
    return best
''',
        _word_list,
    ),
]
