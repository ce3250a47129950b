"""Tools that prove exactness: the explorer (any order of a stage graph, one thread) and the oracle (one process, a
dict)."""
