"""Spans of a training run and what is drawn from them. Imports no torch."""

from nestpipe_kernels.trace.timeline import COMPUTE_LANE, KINDS, Span, Timeline, save_merged

__all__ = ["COMPUTE_LANE", "KINDS", "Span", "Timeline", "save_merged"]
