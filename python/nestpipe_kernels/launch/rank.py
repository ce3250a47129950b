"""The child's side: join the process group that the environment describes (our launcher's or torchrun's)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from datetime import timedelta

from nestpipe_kernels.config import environment, process_environment
from nestpipe_kernels.errors import CommunicationError

__all__ = ["init_rank"]

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_rank(timeout_s: float = 300.0) -> tuple[int, int]:
    """Initialise torch.distributed over gloo from the environment; (0, 1) without a launcher, nothing initialised.

    Blocks until all ranks are there.

    Args:
        timeout_s: limit for joining and for collectives of the default group, seconds.

    Returns:
        (rank, world size).

    Raises:
        RuntimeError: the environment names a rank but not all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
        CommunicationError: the rendezvous did not answer, or not all ranks came in time.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    variables = process_environment()
    missing = [name for name in REQUIRED if not variables.get(name)]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return 0, 1
    if missing:
        raise RuntimeError(
            f"launch: {', '.join(missing)} missing in the environment; start ranks with torchrun or `nestpipe train "
            "--nproc N`, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    _end_with_launcher()
    try:
        # Met first, then initialised: torch counts an initialisation even where the meeting fails, names groups by that
        # count, and ranks that counted differently would wait for each other's names.
        limit = timedelta(seconds=timeout_s)
        store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
        store.set_timeout(limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise CommunicationError(
            f"launch: rank {variables['RANK']} of {variables['WORLD_SIZE']} could not join at "
            f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']} within {timeout_s:g} s: {reason}"
        ) from error
    return dist.get_rank(), dist.get_world_size()


def _end_with_launcher() -> None:
    """End this rank, and what it started, when the launcher dies: its end of a pipe then closes."""
    descriptor = environment("LAUNCHER_PIPE", "")
    if not descriptor.isdigit():
        return

    def watch() -> None:
        try:
            os.read(int(descriptor), 1)
        except OSError:
            return  # not our launcher's pipe: the variable was inherited through another program
        with contextlib.suppress(OSError):  # stderr was, as a rule, a pipe to the launcher
            print("launch: the launcher has ended, so this rank ends too", file=sys.stderr, flush=True)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="nestpipe-launcher-watch", daemon=True).start()
