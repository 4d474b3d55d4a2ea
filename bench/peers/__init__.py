"""Peers: other projects' kernels behind the same stages, each optional."""
