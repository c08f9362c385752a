"""Episode: the plans of all graphs of a training step, chosen together so that the step keeps its budget."""
