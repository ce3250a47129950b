"""What a rank of the launcher's tests does: `rank_program.py CASE FOLDER`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 60.0


def exchange(rank: int) -> list[float]:
    import torch

    from nestpipe_kernels.comm import communicator_for, exchange_same
    from nestpipe_kernels.launch import init_rank

    init_rank(LIMIT_S)
    group = communicator_for(None, LIMIT_S).group("rows")
    return exchange_same(group, torch.tensor(float(rank)), "test").wait().tolist()


def leave() -> None:
    """As a program should end: otherwise a thread of gloo that still has an exchange's tensors in hand when the
    interpreter takes itself apart ends the process with SIGABRT, once in some hundred runs on a busy machine."""
    import torch.distributed as dist

    dist.destroy_process_group()


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if case == "ok":
        print(
            f"out {rank} {exchange(rank)} {os.environ['OMP_NUM_THREADS']} {os.environ['OMP_WAIT_POLICY']}", flush=True
        )
        print(f"err {rank}", file=sys.stderr)
        leave()
    elif case == "raise" and rank == 1:
        raise ValueError("bad id")
    elif case in ("kill", "early"):
        exchange(rank)
        if rank == 1 and case == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            os._exit(0)
        exchange(rank)
    elif case == "stubborn":
        if rank == 1:
            sys.exit(3)
        time.sleep(LIMIT_S)
    elif case in ("sleep", "sleep_joined"):
        if case == "sleep_joined":
            exchange(rank)
        (folder / f"grandchild{rank}").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        (folder / f"ready{rank}").touch()
        time.sleep(LIMIT_S)
    elif case == "aborts":
        if rank == 1:
            time.sleep(1.0)
            os._exit(3)
        print("CommunicationError: rank 1 failed in route: bad id\nterminate called", file=sys.stderr, flush=True)
        os.abort()
    elif case == "slow_to_die":
        if rank == 1:
            print("RemoteRankError: rank 0 failed in route of batch 3: bad id", file=sys.stderr)
            sys.exit(1)
        time.sleep(1.0)
        print("ValueError: bad id", file=sys.stderr)
        sys.exit(2)


main()
