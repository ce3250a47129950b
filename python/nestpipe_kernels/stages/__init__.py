"""What each node of the stage graph does, on one rank; also serves modules that run without a pipeline (`eager`).

No stage knows which schedule runs it: order is the graph's business. Ownership of memory: a BatchState and everything
in it belongs to the nodes of its batch in graph order; the two row buffers belong to `gather` of a batch until
`write_back` of the same batch has run; the store's rows are written by `retrieve` (new rows) and `write_back` alone.
"""
