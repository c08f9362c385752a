"""Training steps as they run: what is recorded of one, and which plans its calls get for that."""
