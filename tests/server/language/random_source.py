"""Random programs of the decoder language, whose values do not depend on timing."""

from __future__ import annotations

import random

HEADER = '''\
def ask(topic, text):
    answer = gen(f"About {topic}: {text}. ", max_tokens=24)
    if answer.contains("a"):
        return answer.upper()
    return answer + "!"

def listed(text):
    yield {"listed": text}
    return text.split(" ")

def write(task):
    """Write {{task}}: {{name=code, max_tokens=12}} and a test: {{name=test, max_tokens=9}}"""

def name_it(thing):
    """A name for {{thing}}: {{name=found, max_tokens=16}}"""

'''
WORDS = ("tea", "jam", "oats", "a long street", "")


class SourceGenerator:
    """Writes one random program."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._number = 0
        self._num_calls = 0

    def source(self) -> str:
        texts, lists = ["seed"], ["words"]
        lines = ["seed = 'tea'", "words = ['one', 'two', 'three']"]
        for _ in range(self._rng.randint(3, 9)):
            lines += self._statement(texts, lists, 0, is_job=False)
        lines.append(f"yield {{'last': {self._rng.choice(texts)}}}")
        return HEADER + "\n".join(lines) + "\n"

    def _name(self, prefix: str) -> str:
        self._number += 1
        return f"{prefix}{self._number}"

    def _statement(  # noqa: C901
        self, texts: list[str], lists: list[str], depth: int, *, is_job: bool, in_loop: bool = False
    ) -> list[str]:
        kinds = ["assign", "assign", "yield", "items", "reassign", "wait", "pair", "swap"]
        if depth < 3:
            kinds += ["branch", "branch", "loop", "attempt"]
        if depth == 0 and not is_job:
            kinds += ["job", "job", "kill", "end"]
        if in_loop:
            kinds += ["leave"]
        kind = self._rng.choice(kinds)
        match kind:
            case "assign":
                name = self._name("t")
                line = f"{name} = {self._text(texts, lists)}"
                texts.append(name)
                return [line]
            case "reassign":
                name = self._rng.choice(texts)
                return [f"{name} = {self._text(texts, lists)}"]
            case "items":
                name = self._name("l")
                line = f"{name} = {self._list(texts, lists)}"
                lists.append(name)
                return [line]
            case "pair":
                one, two = self._name("t"), self._name("t")
                line = f"{one}, {two} = write({self._rng.choice(texts)})"
                texts += [one, two]
                return [line]
            case "swap":
                one, two = self._rng.choice(texts), self._rng.choice(texts)
                return [f"{one}, {two} = {two}, {one}"]
            case "end":
                text = self._rng.choice(texts)
                last = self._rng.choice((f"yield {{'end': {text}}}", f"wait {text}"))
                return [f"if {self._condition(texts)}:", f"    {last}", "    return"]
            case "yield":
                choice = self._rng.choice([self._rng.choice(texts), self._rng.choice(lists)])
                return [f"yield {{'{self._name('y')}': {choice}}}"]
            case "wait":
                name = self._rng.choice(texts)
                return [f"wait {name}"]
            case "branch":
                return self._branch(texts, lists, depth, is_job, in_loop)
            case "loop":
                return self._loop(texts, lists, depth, is_job)
            case "attempt":
                return self._attempt(texts, lists)
            case "job":
                return self._job(texts, lists)
            case "kill":
                return self._kill(texts)
            case _:
                return [
                    f"if {self._condition(texts)}:",
                    f"    {self._rng.choice(('break', 'continue'))}",
                ]

    def _indented(self, lines: list[str]) -> list[str]:
        return [f"    {line}" for line in lines] or ["    pass"]

    def _body(
        self, texts: list[str], lists: list[str], depth: int, is_job: bool, in_loop: bool
    ) -> list[str]:
        lines: list[str] = []
        for _ in range(self._rng.randint(1, 3)):
            lines += self._statement(texts, lists, depth + 1, is_job=is_job, in_loop=in_loop)
        return self._indented(lines)

    def _branch(
        self, texts: list[str], lists: list[str], depth: int, is_job: bool, in_loop: bool
    ) -> list[str]:
        name = self._name("t")
        lines = [f"if {self._condition(texts)}:"]
        for keyword in ("", "else:"):
            lines += [keyword] if keyword else []
            inner_texts, inner_lists = list(texts), list(lists)
            lines += self._body(inner_texts, inner_lists, depth, is_job, False)
            lines.append(f"    {name} = {self._text(inner_texts, inner_lists)}")
        texts.append(name)
        del in_loop
        return lines

    def _loop(self, texts: list[str], lists: list[str], depth: int, is_job: bool) -> list[str]:
        total, item, index = self._name("t"), self._name("i"), self._name("n")
        lines = [f"{total} = ''"]
        items = self._rng.choice([*(f"{each}[:3]" for each in lists), "range(2)"])
        if self._rng.random() < 0.3 and not items.startswith("range"):
            lines.append(f"for {index}, {item} in enumerate({items}):")
        else:
            lines.append(f"for {item} in {items}:")
        inner_texts, inner_lists = [*texts, total], list(lists)
        lines += self._body(inner_texts, inner_lists, depth, is_job, True)
        lines.append(f"    {total} += f'{{{item}}}' + {self._rng.choice(texts)}[:4]")
        texts.append(total)
        return lines

    def _attempt(self, texts: list[str], lists: list[str]) -> list[str]:
        name = self._name("t")
        text = self._rng.choice(texts)
        failing = self._rng.choice(
            [f"f'{{parse_json({text})}}'", f"str(len({text}))", f"{text} + '.'"]
        )
        lines = ["try:", f"    {name} = {failing}"]
        if self._rng.random() < 0.4:
            lines += [f"    if len({text}) > 12:", f"        fail({text})"]
        lines += ["except (ValueError, Failed):", f"    {name} = {self._text(texts, lists)}"]
        texts.append(name)
        return lines

    def _job(self, texts: list[str], lists: list[str]) -> list[str]:
        inner_texts, inner_lists = list(texts), list(lists)
        lines = [self._rng.choice(("StartNewJob:", "with job():"))]
        for _ in range(self._rng.randint(1, 4)):
            lines += self._indented(self._statement(inner_texts, inner_lists, 1, is_job=True))
        texts[:], lists[:] = inner_texts, inner_lists
        return lines

    def _kill(self, texts: list[str]) -> list[str]:
        """Return a call that is killed before it ends, what reads it, and jobs that wait for it.

        The client never answers, so a program ends only if the kill ends all that serves it.
        """
        never, served, both, either = (self._name("k") for _ in range(4))
        text, word = self._rng.choice(texts), self._name("y")
        texts.append(either)
        waiting = [f"wait {self._rng.choice((never, both))}", f"yield {{'{word}': {text}}}"]
        if self._rng.random() < 0.5:
            waiting = [f"if len({text}) < 9999:", *self._indented(waiting), waiting[1]]
        elif self._rng.random() < 0.5:
            waiting = ["for _ in range(2):", *self._indented(waiting), waiting[1]]
        return [
            f"{served} = client('serves')",
            f"{never} = client('never', data={served})",
            f"{both} = gen(f'{{{never}}} {{{text}}}', max_tokens=9)",
            "with job():",
            f"    if len({text}) < 9999:",
            f"        {never}.kill()",
            "with job():",
            *self._indented([f"yield {{'{word}': 1}}", *waiting, f"yield {{'{word}': {both}}}"]),
            f"yield {{'{word}': {both}}}",
            f"if {both} == 'x':",
            f"    yield {{'{word}': 2}}",
            f"{either} = first({never}, {text})",
        ]

    def _condition(self, texts: list[str]) -> str:
        text, other = self._rng.choice(texts), self._rng.choice(texts)
        return self._rng.choice(
            [
                f"{text}.contains('e')",
                f"len({text}) % 2 == 0",
                f"{text} == {other}",
                f"not {text}.startswith('a') and len({other}) > 8",
                f"'o' in {text} or {other} < 'm'",
            ]
        )

    def _text(self, texts: list[str], lists: list[str]) -> str:
        text, other = self._rng.choice(texts), self._rng.choice(texts)
        self._num_calls += 1
        calls = [
            f"gen(f'On {{{text}}} and {{{other}}}: ', max_tokens={self._rng.choice((3, 17, 64))})",
            f"llm_chat([system('Be brief.'), user({text})], max_tokens=20)['context']",
            f"f'{{llm_chat([user({text}), assistant({other}), user(\"?\")], max_tokens=20)}}'",
            f"ask({text}, {other})",
            f"name_it({text})",
            f"gen({text} + '.', max_tokens=9) if {self._condition(texts)} else {other}",
        ]
        pure = [
            f"{text} + ' ' + {other}[:20]",
            f"{text}.upper()[:30]",
            f"f'{{len({text})}}:{{{self._rng.choice(lists)}}}'[:40]",
            f"', '.join([f'<{{x}}>' for x in {self._rng.choice(lists)}])[:40]",
            f"{text}.replace('e', '3')[-25:]",
            repr(self._rng.choice(WORDS)),
        ]
        return self._rng.choice(
            calls if self._num_calls <= 14 and self._rng.random() < 0.6 else pure
        )

    def _list(self, texts: list[str], lists: list[str]) -> str:
        text, items = self._rng.choice(texts), self._rng.choice(lists)
        self._num_calls += 3
        pure = [
            f"{text}.split(' ')[:4]",
            f"{items} + [{text}]",
            f"[f'{{x}}.' for x in {items} if f'{{x}}'.contains('e')]",
            f"[[i, len(f'{{x}}')] for i, x in enumerate({items}[:3])]",
            f"listed({text})[:3]",
            f"[f'{{i}}{{x}}' for i, x in enumerate({items}[:4]) if i % 2 == 0]",
        ]
        calls = [
            f"[gen(f'{{x}} of {{{text}}}', max_tokens=8) for x in {items}[:3]]",
            f"[ask(x, {text}) for x in {items}[:2]]",
            f"[gen(f'{{i}}{{x}}', max_tokens=5) for i, x in enumerate({items}[:4]) if i > 1]",
        ]
        return self._rng.choice(
            calls if self._num_calls <= 14 and self._rng.random() < 0.5 else pure
        )
