"""Checkpoints: a directory of tensor files and a manifest that is written last."""
