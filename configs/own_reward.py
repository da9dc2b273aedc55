"""Your own reward: a function of what it names among completion, tokens, row, prompt. Used by own_data.toml."""


def digits(completion, row):
    """Some credit for a number at all, the rest for the right one; a dict's parts are weighted by the config."""
    return {"format": completion.isdigit(), "correct": completion == row["solution"]}
