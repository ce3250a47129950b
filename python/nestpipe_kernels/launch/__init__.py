"""Several ranks on one machine: start them, name the one that failed first, leave none behind."""

from nestpipe_kernels.launch.network import Network
from nestpipe_kernels.launch.rank import init_rank
from nestpipe_kernels.launch.run import run_ranks

__all__ = ["Network", "init_rank", "run_ranks"]
