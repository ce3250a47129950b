"""KuaiRand (Gao et al., CIKM 2022, arXiv:2208.08696): short videos that users clicked, as sequences.

Read are the published log files (`log_standard_*.csv`, `log_random_*.csv`): a header, then one line for each video that
was shown; of the columns `user_id`, `video_id`, `time_ms` and `is_click` are used, the others ignored.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nestpipe_kernels.data.sequences import Interactions
from nestpipe_kernels.data.text_files import csv_rows, malformed, parse_key, read_lines

__all__ = ["read_clicks"]

_COLUMNS = ("user_id", "video_id", "time_ms", "is_click")


def read_clicks(path: str | Path) -> Interactions:
    """The clicks of a log file, or of all `log_*.csv` of a folder (or of its folder `data`), by name.

    Raises:
        FileNotFoundError: no such file, or a folder without logs.
        ValueError: a wrong header or row, with file, line, expected and got; or no click at all.
    """
    users: list[int] = []
    videos: list[int] = []
    times: list[int] = []
    for file in _log_files(Path(path)):
        lines = read_lines(file, "kuairand")
        names = next(csv_rows([next(lines, "")], file, 1), [])
        if missing := [name for name in _COLUMNS if name not in names]:
            raise malformed(file, 1, f"columns {', '.join(_COLUMNS)} (missing: {', '.join(missing)})", ",".join(names))
        user, video, time, click = (names.index(name) for name in _COLUMNS)
        for number, fields in enumerate(csv_rows(lines, file, 2), 2):
            if len(fields) != len(names):
                raise malformed(file, number, f"{len(names)} fields", fields)
            if fields[click] not in ("0", "1"):
                raise malformed(file, number, "is_click 0 or 1", fields[click])
            if fields[click] == "1":
                users.append(parse_key(fields[user], file, number, "user_id"))
                videos.append(parse_key(fields[video], file, number, "video_id"))
                times.append(parse_key(fields[time], file, number, "time_ms"))
    if not users:
        raise ValueError(f"kuairand: {path} has no clicks")
    return Interactions(
        torch.tensor(users, dtype=torch.int64),
        torch.tensor(videos, dtype=torch.int64),
        torch.tensor(times, dtype=torch.float64) / 1000,
    )


def _log_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("log_*.csv")) or sorted((path / "data").glob("log_*.csv"))
    if not found:
        raise FileNotFoundError(f"kuairand: the folder {path} has no log_*.csv")
    return found
