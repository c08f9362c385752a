"""What a schedule will take, in bytes under a memory model and in seconds; the planning problem."""
