"""Writes files in the layout in which KuaiRand was published, with few users and videos."""

from __future__ import annotations

import random
from pathlib import Path

HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)


def write_log(path: Path, users: int, videos: int, lines: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Write a log; what was clicked, as (user, video, second)."""
    chosen, clicked = random.Random(seed), []
    with path.open("w") as file:
        file.write(HEADER + "\n")
        for _ in range(lines):
            user, video, time_ms = (
                chosen.randrange(users),
                chosen.randrange(videos),
                1649400000000 + chosen.randrange(10**9),
            )
            click = int(chosen.random() < 0.5)
            file.write(f"{user},{video},20220408,1200,{time_ms},{click},0,0,0,0,0,0,3000,9000,0,0,0,0,1\n")
            if click:
                clicked.append((user, video, time_ms // 1000))
    return clicked
