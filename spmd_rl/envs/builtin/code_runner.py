"""What runs in the box: it calls functions that a model wrote, and says what each call returned.

This file's text is all of the package that a box gets, as the program of `python -I -S -c`. The model's code runs in
the same process and may do to it whatever it likes. So there is nothing to find out here, least of all what is right:
what comes out is compared with that elsewhere.

Invariants: the first line comes before any of the model's code has run; line i behind it is about call i, `[value]` in
JSON, or `[]` where the call raised, or returned what is not of JSON's own types or too long; what the model's code
prints stands nowhere among them.
"""

import os
import sys
from _json import encode_basestring_ascii  # to import json doubles the time that Python takes to start

BEGAN = "began"
LONGEST = 4096  # characters of a value


def main() -> None:
    """Read what to call from stdin, a literal that the environment wrote; answer on stdout."""
    work = eval(sys.stdin.read())
    answers = os.dup(1)  # no program that the model's code starts inherits it
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.write(answers, f"{BEGAN}\n".encode())
    try:
        call = FORMS[work["form"]](work)
    except BaseException:
        os._exit(1)
    for name, arguments in work["calls"]:
        try:
            line = f"[{in_json(call(name, arguments))}]"
        except BaseException:  # SystemExit too
            line = "[]"
        os.write(answers, f"{line if len(line) <= LONGEST else '[]'}\n".encode())
    os._exit(0)


def expression(work: dict):
    """Calls of an expression over the parameters `names`, or of a function that it makes."""
    code = compile(work["text"], "<answer>", "eval")

    def call(_, arguments):
        value = eval(code, dict(zip(work["names"], arguments, strict=True)))
        return value(*arguments) if callable(value) else value

    return call


def functions(work: dict):
    """Calls of the functions that a text defines."""
    module = type(sys)("answer")
    sys.modules["answer"] = module
    exec(compile(work["text"], "<answer>", "exec"), module.__dict__)
    return lambda name, arguments: getattr(module, name)(*arguments)


def files(work: dict):
    """Calls of `module.function`, from files in the working folder."""
    sys.path.insert(0, os.getcwd())

    def call(name, arguments):
        module, _, function = name.rpartition(".")
        __import__(module)
        return getattr(sys.modules[module], function)(*arguments)

    return call


FORMS = {"expression": expression, "function": functions, "files": files}


def in_json(value: object) -> str:
    """The value as JSON. TypeError or ValueError for what is none, an instance of a subclass included."""
    kind = type(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is int or (kind is float and value - value == 0):
        return repr(value)
    if kind is str:
        return encode_basestring_ascii(value)
    if kind is list:
        return f"[{','.join(map(in_json, value))}]"
    if kind is dict and all(type(name) is str for name in value):
        return f"{{{','.join(f'{encode_basestring_ascii(name)}:{in_json(part)}' for name, part in value.items())}}}"
    raise TypeError


if __name__ == "__main__":
    main()
