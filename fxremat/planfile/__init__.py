"""Plans as files: what is in one, how it is read and written, and how two differ."""
