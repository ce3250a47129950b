"""The benchmark suite, installed as nestpipe_kernels.bench."""
