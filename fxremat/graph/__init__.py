"""The joint graph: what its nodes are, in which orders they may run, and what runs them again."""
