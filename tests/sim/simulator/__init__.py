"""A whole run in one thread: the real services on an in-memory NATS, a virtual clock and one seed."""
