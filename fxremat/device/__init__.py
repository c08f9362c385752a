"""What the machine does: rates, scratch memory, measured steps, and the ledger that remembers them."""
