"""Byte layouts: each transform, its inverse and the kernels' addressing live in one file."""
