"""How `auto` and the paper's planners find plans."""
