"""From a schedule to graphs: the rewritten joint graph, its forward and its backward."""
