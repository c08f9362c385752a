"""Programs drawn at random, as source: whatever an ``nn.Module`` that trains may do, in any order.

A *drawing* begins with inputs and adds one *statement* after the other, of a template whose places are filled
with earlier values of the right kind. It runs each in eager at once, so that it knows what every value is; a
statement that eager refuses, or that takes values out of bounds, is left out. A *program* is what comes of
it: a module's source with up to two parts, which may be compiled apart, and the source of its inputs. The
same random numbers give the same program.

``smaller`` gives the programs with one statement less, for finding the least one that still fails.

Left out: programs that eager can't train twice in a row, and operators that are no function of their inputs
and the generator.
"""

from __future__ import annotations

import functools
import linecache
import math
import random
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from templates import INPUTS, KINDS, NAMESPACE, REGIONS, ROWS, TEMPLATES, WEIGHTS
from torch import Tensor, nn

__all__ = ["Batch", "Program", "draw_program", "smaller"]

MOST_NUMBERS, LARGEST = 1 << 15, 1e3  # of a value


# --- Programs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs of a program: what it is called with, and the leaves of autograd behind that."""

    given: list[Tensor]
    leaves: list[Tensor]


@dataclass(frozen=True, slots=True)
class Program:
    """A program that trains.

    Attributes:
        inputs: An expression for each input; it may read the list ``given`` of those before it.
        statements: What the program does; a statement may have two lines.
        second: Where its second part begins, which is compiled apart; all statements if there is none.
        returned: What it returns: names, or names that are detached behind a ``loss``.
    """

    inputs: tuple[str, ...]
    statements: tuple[str, ...]
    second: int
    returned: tuple[str, ...]

    def __repr__(self) -> str:
        return f"\n{self.source}"

    @property
    def has_loss(self) -> bool:
        """Whether the first output is a loss, and no other has a gradient."""
        return self.returned[:1] == ("loss",)

    @property
    def parts(self) -> tuple[str, ...]:
        """The methods that may be compiled apart."""
        return ("first",) if self.second >= len(self.statements) else ("first", "second")

    @property
    def source(self) -> str:
        """The program as it is run: a class and a function that gives its inputs."""
        names = [f"x{place}" for place in range(len(self.inputs))]
        head, tail = self.statements[: self.second], self.statements[self.second :]
        if len(self.parts) == 1:
            methods = _method("first", names, head, self.returned)
            whole = "return self.first(*given)"
        else:
            made = [*names, *_made_by(head)]
            read = set(_names("\n".join((*tail, *self.returned))))
            passed = [each for each in dict.fromkeys(made) if each in read]
            methods = _method("first", names, head, passed) + _method("second", passed, tail, self.returned)
            whole = "return self.second(*self.first(*given))"
        forward = f"    def forward(self, *given):\n        {whole}\n"
        given = "".join(f"    given.append({each})\n" for each in self.inputs)
        return f"class Drawn(Layers):\n{methods}{forward}\ndef give(given, leaf):\n{given}"

    def module(self) -> nn.Module:
        """A new one, with the weights of seed 0."""
        torch.manual_seed(0)
        module: nn.Module = _ran(self.source)["Drawn"]()
        return module

    def batch(self) -> Batch:
        """New inputs, with the same numbers each time."""
        torch.manual_seed(1)
        given: list[Tensor] = []
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            leaves.append(tensor.requires_grad_())
            return tensor

        _ran(self.source)["give"](given, leaf)
        return Batch(given, leaves)


def _method(name: str, given: Sequence[str], statements: Sequence[str], returned: Sequence[str]) -> str:
    head = f"def {name}({', '.join(['self', *given])}):"
    body = textwrap.indent("\n".join([*statements, f"return [{', '.join(returned)}]"]), "    ")
    return textwrap.indent(f"{head}\n{body}\n", "    ")


def _made_by(statements: Sequence[str]) -> list[str]:
    """The names that statements give to values."""
    return [name for each in statements for name in _made(each)]


def _made(statement: str) -> list[str]:
    """The names that a statement gives to values."""
    line = statement.splitlines()[-1]
    target = re.match(r"\s*(loss|v\d+(?:, v\d+)*)(?:, \*_)? = ", line)
    return target.group(1).split(", ") if target else []


def _names(text: str) -> list[str]:
    """The values that a text speaks of."""
    return re.findall(r"\b(?:loss|[vx]\d+)\b", text)


@functools.lru_cache(maxsize=64)
def _ran(source: str) -> dict[str, Any]:
    """What a source defines; its lines are shown in tracebacks."""
    file = f"<drawn program {abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    found = dict(NAMESPACE)
    exec(compile(source, file, "exec"), found)
    return found


def smaller(program: Program) -> Iterator[Program]:
    """The programs that have less: no second part, or a statement, an output or an input left out."""
    if len(program.parts) > 1:
        yield replace(program, second=len(program.statements))
    for place in reversed(range(len(program.statements))):
        yield _without(program, place)
    for place in range(len(program.returned)):
        if place or not program.has_loss:
            yield replace(program, returned=program.returned[:place] + program.returned[place + 1 :])
    plain = [each.splitlines()[-1].strip() for each in program.statements]
    for place, each in enumerate(plain):
        if each != program.statements[place]:
            changed = (*program.statements[:place], each, *program.statements[place + 1 :])
            yield replace(program, statements=changed)


def _without(program: Program, place: int) -> Program:
    """The program without a statement, and without all that reads what it makes."""
    gone = set(_made(program.statements[place]))
    kept = []
    second = program.second
    for at, statement in enumerate(program.statements):
        if at == place or gone & set(_names(statement)):
            gone |= set(_made(statement))
            second -= at < program.second
        else:
            kept.append(statement)
    returned = tuple(each for each in program.returned if not gone & set(_names(each)))
    return replace(program, statements=tuple(kept), second=second, returned=returned)


# --- Drawing --------------------------------------------------------------------------------------------


class Drawing:
    """A program that grows, and the values that its statements have in eager."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rows = chance.choice(ROWS)
        count = chance.randint(1, 3)
        self.inputs = tuple(each.format(rows=self.rows) for each in [INPUTS[chance.randrange(8)]])
        self.inputs += tuple(chance.choice(INPUTS).format(rows=self.rows) for _ in range(count - 1))
        self.statements: list[str] = []
        self.replay()

    def replay(self) -> None:
        """Run all statements again."""
        program = Program(self.inputs, (), 0, ())
        module, batch = program.module(), program.batch()
        self.values: dict[str, Any] = {f"x{place}": each for place, each in enumerate(batch.given)}
        self.known = {**NAMESPACE, "self": module, **self.values}
        torch.manual_seed(2)
        for each in self.statements:
            self._run(each)

    def _run(self, statement: str) -> None:
        exec(statement, self.known)
        for name in _made(statement):
            self.values[name] = self.known[name]

    def add(self) -> None:
        """Add a statement, if eager takes the one that is drawn."""
        statement = self._filled(self._template())
        if statement is None:
            return
        try:
            self._run(statement)
            fits = all(map(_is_bounded, (*map(self.values.get, _made(statement)), *self.values.values())))
        except Exception:  # of eager, whatever it is
            fits = False
        if fits:
            self.statements.append(statement)
        if not fits or (_is_write(statement) and not trains(self.program())):
            del self.statements[len(self.statements) - fits :]
            self.replay()

    def _template(self) -> str:
        group = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        return self.chance.choice(TEMPLATES[group])

    def _filled(self, template: str) -> str | None:
        """A template with values in its places; None where there are none."""
        filled: dict[str, str] = {}
        for place in dict.fromkeys(re.findall(r"\{(\w\d?)\}", template)):
            found = self._value(place[0], next(iter(filled.values()), ""))
            if found is None:
                return None
            filled[place] = found
        text = re.sub(r"\{(\w\d?)\}", lambda match: filled[match[1]], template)
        if not template.startswith("="):
            writes_state = template.startswith("self.")
            inside = writes_state or self.chance.random() < 0.3
            return f"with torch.no_grad():\n    {text}" if inside else text
        count, _, text = text.removeprefix("=").partition(" ")
        names = [f"v{len(self.values) + place}" for place in range(int(count or 1))]
        line = f"{', '.join(names)}{', *_' if count else ''} = {text}"
        if not count and self.chance.random() < 0.06 and filled:
            line = f"{names[0]} = checkpoint(lambda: {text})"
        if self.chance.random() < 0.12:
            return f"with {self.chance.choice(REGIONS)}:\n    {line}"
        return line

    def _value(self, kind: str, first: str) -> str | None:
        if kind == "n":
            return str(self.chance.choice((0.5, 2, -1.5, 0.1)))
        shape = self.values[first].shape if first in self.values else None
        found = [
            name
            for name, each in self.values.items()
            if (each.is_floating_point() and each.shape == shape if kind == "s" else KINDS[kind](each))
        ]
        if not found:
            return None
        learned = [name for name in found if self.values[name].requires_grad]
        found = learned if learned and self.chance.random() < 0.6 else found
        return self.chance.choice(found[-4:] if self.chance.random() < 0.7 else found)

    def program(self) -> Program:
        """What was drawn so far; it returns all that trains."""
        count = len(self.statements)
        return Program(self.inputs, tuple(self.statements), count, tuple(self.values))

    def finished(self) -> Program:
        """The program, with some of its values returned and maybe in two parts."""
        names = list(self.values)
        late = [name for name in names[-5:] if self.values[name].requires_grad]
        learned = late or [name for name in names if self.values[name].requires_grad]
        returned = learned[-1:] + self.chance.choices(names, k=self.chance.choice((0, 0, 1, 2, 3)))
        if self.chance.random() < 0.15:
            returned.append("self.weight")
        if self.chance.random() < 0.7:
            returned = self._with_a_loss(returned)
        count = len(self.statements)
        second = self.chance.randrange(1, count) if count > 3 and self.chance.random() < 0.2 else count
        return replace(self.program(), returned=tuple(returned), second=second)

    def _with_a_loss(self, returned: Sequence[str]) -> list[str]:
        """Names to return instead: a loss, which is a last statement, and nothing else with a gradient."""
        learned = [
            each for each in dict.fromkeys(returned) if getattr(self.known.get(each), "requires_grad", True)
        ]
        squares = [f"({each}.abs() * 0.7).float().square().sum()" for each in learned]
        self.statements.append(f"loss = {' + '.join(squares)}")
        return ["loss", *(f"{each}.detach()" for each in returned)]


def _is_write(statement: str) -> bool:
    return not _made(statement)


def _is_bounded(value: Any) -> bool:
    """Whether a value is a tensor, small, and of numbers that are not large."""
    if not isinstance(value, Tensor) or value.numel() > MOST_NUMBERS or value.dim() > 5:
        return False
    if not value.numel() or value.dtype == torch.bool:
        return True
    return math.isfinite(largest := float(value.detach().abs().max())) and largest < LARGEST


def trains(program: Program) -> bool:
    """Whether eager trains the program twice in a row."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = program.module()
            for _ in range(2):
                step(module, program.batch())
    except Exception:  # of eager, whatever it is
        return False
    return True


def step(call: Callable[..., Any], batch: Batch) -> list[Tensor]:
    """A forward and a backward; the outputs. The loss weights each number of each output differently."""
    outputs: list[Tensor] = call(*batch.given)
    losses = [_weighted_sum(each) for each in outputs if each.requires_grad]
    torch.stack(losses).sum().backward()
    return outputs


def _weighted_sum(output: Tensor) -> Tensor:
    parts = torch.view_as_real(output) if output.is_complex() else output
    weights = torch.linspace(0.5, 1.5, parts.numel()).reshape(parts.shape)
    return (parts.float() * weights).sum()


def draw_program(chance: random.Random, most: int = 14) -> Program | None:
    """A program of at most so many statements; None if what was drawn doesn't train."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawing = Drawing(chance)
        for _ in range(chance.randint(2, most)):
            drawing.add()
        program = drawing.finished()
        return program if trains(program) else None
