"""Whether a card has room for training a model, with which plan and which batch."""
