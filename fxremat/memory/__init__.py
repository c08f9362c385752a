"""Memory of a schedule whose values have buffers of their own: lives of storages, and writes in place."""
