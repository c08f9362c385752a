"""Terms: what the loops of a graph compute, in whatever schedule, numbered.

A term is a node, and what it is computed of: other terms, and what is read of memory, the graph's inputs and
the values of nodes that are stored. The loops of thousands of schedules are few terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The nodes through which a value is read that show parts of it, or move them, and which of its parts.
Place = tuple[tuple[int, int], ...]

# A node's index; then for each of its operands the number of a term, or a negative number for what is read
# of memory: ~index of an input, or of a node and of how often it ran before (``Operations``).
Term = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a graph that were seen so far, and what was found out of them.

    Attributes:
        terms: By their numbers.
        numbers: The numbers by the terms.
        counted: What ``Operations`` counted of a term, by its number, and by whether convolutions of the
            forward work channels last.
        picked: The parts that an operand shows of what it looks at, by the operand, by whether that is
            stored, and by whether convolutions of the forward work channels last.
    """

    terms: list[Term] = field(default_factory=list)
    numbers: dict[Term, int] = field(default_factory=dict)
    counted: dict[tuple[int, bool], tuple[int, int]] = field(default_factory=dict)
    picked: dict[tuple[int, bool, bool], Place] = field(default_factory=dict)

    def number(self, term: Term) -> int:
        """The number of a term."""
        found = self.numbers.get(term)
        if found is None:
            found = self.numbers[term] = len(self.terms)
            self.terms.append(term)
        return found
