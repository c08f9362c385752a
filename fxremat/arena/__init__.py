"""One block of memory for a schedule: offsets for all its buffers."""
