"""A minimum cut of a networkx graph by Dinic's algorithm (1970) on flat lists.

It stands in for ``networkx.minimum_cut`` where PyTorch's partitioner looks for a cut, and gives the same
one: of all minimum cuts the one with the smallest sink's side. Phases of breadth-first levels and blocking
flows; iterative, since paths are as long as models are deep.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import networkx as nx

Cut: TypeAlias = tuple[Any, tuple[set[Any], set[Any]]]


def minimum_cut(graph: Any, source: Any, sink: Any) -> Cut:
    """The capacity of a minimum cut and its two sides, the source's first.

    Args:
        graph: A directed networkx graph whose edges have a ``capacity``, infinite where it is missing.
        source: A node; without edges if it is not in the graph.
        sink: Another.

    Raises:
        NetworkXUnbounded: A path of infinite capacity leads from the source to the sink.
    """
    names = list(dict.fromkeys((*graph, source, sink)))
    number = {name: index for index, name in enumerate(names)}
    flow = _Flow(len(names))
    for tail, others in graph.adjacency():
        for head, data in others.items():
            flow.add_edge(number[tail], number[head], data.get("capacity", math.inf))
    value = flow.maximize(number[source], number[sink])
    if value == math.inf:
        raise nx.NetworkXUnbounded("Infinite capacity path, flow unbounded above.")
    leads = flow.levels_to(number[sink])
    behind = {name for name, level in zip(names, leads, strict=True) if level < math.inf}
    return value, (set(names) - behind, behind)


class _Flow:
    """A network with what each edge can still carry; edge ``e ^ 1`` is the reverse of edge ``e``."""

    def __init__(self, size: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(size)]  # of each node
        self.heads: list[int] = []
        self.room: list[Any] = []

    def add_edge(self, tail: int, head: int, capacity: Any) -> None:
        """Add an edge and its reverse, which carries nothing yet."""
        self.edges[tail].append(len(self.heads))
        self.edges[head].append(len(self.heads) + 1)
        self.heads += (head, tail)
        self.room += (capacity, 0)

    def maximize(self, source: int, sink: int) -> Any:
        """Send as much as can be sent, and return how much that is."""
        total = 0
        while total != math.inf:
            level = self.levels_to(sink)
            if level[source] == math.inf:
                return total
            total += self._block(source, sink, level)
        return total

    def levels_to(self, sink: int) -> list[float]:
        """How many edges with room lead from each node to the sink at least; inf where none do."""
        level = [math.inf] * len(self.edges)
        level[sink] = 0
        queue = [sink]
        for node in queue:
            for edge in self.edges[node]:
                tail = self.heads[edge]
                if level[tail] == math.inf and self.room[edge ^ 1]:
                    level[tail] = level[node] + 1
                    queue.append(tail)
        return level

    def _block(self, source: int, sink: int, level: list[float]) -> Any:
        """Send along shortest paths until none is left, and return how much that was."""
        edges, heads, room = self.edges, self.heads, self.room
        tried = [0] * len(edges)  # of each node's edges, how many lead nowhere any more
        total: Any = 0
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min(room[edge] for edge in path)
                total += amount
                if amount == math.inf:
                    return total
                for edge in path:
                    room[edge] -= amount
                    room[edge ^ 1] += amount
                full = next(at for at, edge in enumerate(path) if not room[edge])
                node = heads[path[full] ^ 1]
                del path[full:]
            if tried[node] == len(edges[node]):
                if node == source:
                    return total
                node = heads[path.pop() ^ 1]
                tried[node] += 1
                continue
            edge = edges[node][tried[node]]
            if room[edge] and level[heads[edge]] == level[node] - 1:
                path.append(edge)
                node = heads[edge]
            else:
                tried[node] += 1
