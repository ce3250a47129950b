"""Tensor files in the safetensors format: the official library opens what the writer makes."""

from __future__ import annotations

from .file_reader import TensorFile, open_tensor_file
from .file_writer import TensorFileWriter
from .layout import FileRecord, TensorRecord, record_layout

__all__ = ["FileRecord", "TensorFile", "TensorFileWriter", "TensorRecord", "open_tensor_file", "record_layout"]
