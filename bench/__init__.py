"""The benchmark suite, installed as nestpipe_kernels.bench: one module per case, run by `nestpipe bench CASE`."""
