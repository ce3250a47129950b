"""Which new keys get a row (admission) and which rows go when there is no room (eviction)."""

from .admission import CountingFilter, MinFrequency, Probability
from .eviction import LFU, LRU, TTL, Score

__all__ = ["LFU", "LRU", "TTL", "CountingFilter", "MinFrequency", "Probability", "Score"]
