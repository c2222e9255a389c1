# ruff: noqa: E501, RUF001 - lists of short texts
"""Sources that attack the server, and bombs for its parser."""

from __future__ import annotations

ATTRIBUTES = (
    "__class__", "__bases__", "__subclasses__", "__globals__", "__init__", "__mro__", "__dict__",
    "__builtins__", "f_globals", "gi_frame", "func_globals", "__import__", "__code__", "mro",
)  # fmt: skip
BUILTINS = (
    "eval", "exec", "compile", "open", "__import__", "getattr", "setattr", "globals", "locals",
    "vars", "input", "breakpoint", "memoryview", "type", "object", "super", "dir", "exit", "help",
)  # fmt: skip
STATEMENTS = (
    "import os", "from os import system", "import os as o; yield o.system('id')",
    "while True: pass", "class A: pass", "del x", "global x", "nonlocal x", "assert 0",
    "raise SystemExit", "async def f(): pass", "lambda: 0", "x = yield", "with open('/etc/passwd') as f: pass",
    "try:\n    pass\nfinally:\n    pass\nyield 1", "@evil\ndef f():\n    pass\nyield 1",
    "def f(*a):\n    return a\nyield f(1)", "def f(**k):\n    return k\nyield f(a=1)",
    "def f():\n    def g():\n        return 1\n    return g()\nyield f()",
    "x = (y := 1)", "x = *[1], 2\nyield x", "x = [*range(3)]\nyield x", "x = {**{}}\nyield x",
    "x = 1 if 2 else 3 ** 99999\nyield x", "x = 'a' * 10 ** 9\nyield x", "x = [0] * 99999999\nyield x",
    "x = '%099999999d' % 1\nyield x", "x = '{0.__class__}'.format(1)\nyield x",
    "x = f'{1!r}'\nyield x", "x = f'{1:>{99999999}}'\nyield x", "x = 1j\nyield x", "x = b'a'\nyield x",
    "x = ...\nyield x", "x = 10 ** 10 ** 10\nyield x", "x = 1 << 99999999\nyield x", "x = ~1\nyield x",
    "x = 1e999\nyield x", "x = 999999999999999999999999\nyield x", "x: int\nx: str\nx = 1",
    "match 1:\n    case 1:\n        yield 1", "for x in y: pass", "for i in range(10**9): pass\nyield 1",
    "print(open('/etc/passwd').read())", "x.y = 1", "x[0] = 1", "x = y = 1\nyield 1",
    "with job(timeout=-1):\n    yield 1", "with job(on_error='explode'):\n    yield 1",
    "wait 1", "wait()", "nothing.kill()", "yield from [1]", "return", "break", "continue",
    "yield llm_chat()", "yield llm_chat(1, 2, 3)", "yield gen()", "yield gen('a', schema=1)",
    "yield gen('a', regex='(')", "yield gen('a', choices=[])", "yield gen('a', max_tokens=-1)",
    "yield gen('a', max_tokens=10**9)", "yield gen('a', stop=[1])", "yield gen('a', temperature='x')",
    "yield client()", "yield call()", "yield race()", "yield fail()", "\x00", "\ud800", "'\\ud800'",
    "yield 'a'['b']", "yield [1]['a']", "yield (1)(2)", "yield 'a'.append(1)", "x = 1\nx()\nyield x",
    "def f(x):\n    return f(x)\nyield f(1)", "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\nyield f(1)",
)  # fmt: skip


def bombs() -> list[str]:
    """Return texts of at most 64 KiB whose syntax tree, or whose program, is as large as possible."""
    size = 65_000
    doubling = "def f0(x):\n    return gen(x)\n" + "".join(
        f"def f{i}(x):\n    return f{i - 1}(x) + f{i - 1}(x)\n" for i in range(1, 15)
    )
    return [
        "(" * size, "[" * size, "{" * size, "((" * 90 + "))" * 90, "-" * size + "1", "not " * 16_000 + "1",
        "a." * 32_000 + "b", "a(" * 200 + ")" * 200, "x" + "[0]" * 20_000, "x = " + "1+" * 32_000 + "1",
        "x = " + "a if b else " * 5_000 + "1", "f'" + "{x}" * 16_000 + "'", "f'" + "{f'" * 40 + "a",
        "x=1\n" * 16_000, "yield 1\n" * 8_000, "if a:\n pass\n" * 5_000, "\n" * size, " " * size, "#" * size,
        "'" * size, '"""' * 20_000, "\\\n" * 30_000, "\t" * size, "lambda:" * 9_000 + "1", "x=" * 30_000 + "1",
        "".join(" " * i + "if 1:\n" for i in range(99)), "".join(" " * i + "for a in b:\n" for i in range(60)),
        "x = " + "[" * 95 + "]" * 95, "x = {" + "'a':1," * 10_000 + "}", "x = [" + "1," * 30_000 + "]",
        "def f(" + ",".join(f"a{i}" for i in range(9_000)) + "):\n pass", "x = '" + "\\N{SPACE}" * 7_000 + "'",
        "x = " + "9" * 60_000, "x = 0x" + "f" * 60_000, "x = 1e" + "9" * 60_000, "é" * 32_000, "𝔘" * 16_000,
        "@" * size, "*" * size, ";" * size, "x;" * 32_000, "," * size, ":" * size, "x:" * 32_000,
        doubling + "yield f14('a')", doubling.replace("gen(x)", "x + x") + "yield f14('aaaaaaaaaaaaaaaa')",
        "x = 'a'\n" + "x = x + x\n" * 2_000 + "yield x", "x = []\n" + "x = [x, x]\n" * 1_000 + "yield x",
        "x = gen('a')\n" + "x = x if x == 'a' else gen(x)\n" * 400 + "yield x",
        "x = gen('a')\n" + "if x == 'a':\n    x = gen(x)\n" * 800 + "yield x",
        "for a in range(9):\n" + "".join(f"{' ' * i}for a in range(9):\n" for i in range(1, 30)) + " " * 30 + "yield a",
        "x = " + "[" * 30 + "1" + " for a in b]" * 30, "wait " + "a, " * 20_000 + "a", "StartNewJob:\n" * 5_000,
        "\n".join(f"StartNewJob:\n    yield {i}" for i in range(1_200)), "wait a\n" * 9_000,
        "try:\n pass\nexcept A: pass\n" * 2_000, "x = " + "not " * 5_000 + "1\nyield x",
        "for x in gen('a', stream=True):\n    yield x\n" * 1_000, "x = " + "a and " * 10_000 + "a",
        "x = " + "a < " * 10_000 + "a", "'" + "wait a\n" * 9_000, "f'''" + "{a}\n" * 12_000,
    ]  # fmt: skip


def template_bombs() -> list[str]:
    """Return templates that are as expensive as possible."""
    return [
        "{{" * 32_000, "{{a" * 20_000, "{{a}}" * 13_000, "{{name=a, x='" + "'" * 60_000, "}}" * 30_000,
        "{{name=a, schema=" + "[" * 16_000, "{{name=a, schema=" + "{'a':" * 9_000, "{{name=" * 9_000,
        "{{name=a, stop=[" + "'a'," * 4_000 + "]}}", "{{{{" * 16_000, "{" * 65_000, "{{name=a" + ", b=1" * 9_000 + "}}",
        "{{name=a, value=" + "-" * 15_000 + "1}}", "{{name=a, value=" + "(" * 15_000 + "}}", "{{=}}" * 9_000,
        "{{name=a, end=" + "<" * 16_000 + "}}", "".join(f"{{{{name=a{i}}}}}" for i in range(5_000)), "\x00{{name=a}}",
    ]  # fmt: skip


def sources() -> list[str]:
    """Return hostile sources in Python's syntax."""
    attacks = [f"yield 'a'.{name}()" for name in ATTRIBUTES]
    attacks += [f"x = gen('a')\nyield x.{name}" for name in ATTRIBUTES]
    attacks += [f"yield [1].{name}.{name}" for name in ATTRIBUTES]
    attacks += [f"yield {name}('1')" for name in BUILTINS]
    attacks += [f"x = {name}\nyield x" for name in BUILTINS]
    return [*attacks, *STATEMENTS, *bombs()]
