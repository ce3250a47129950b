"""Tools for checkpoint directories: inspect, verify, reshard, diff. They load no model."""
