"""Compile-only proofs: what the kernels become on GPUs that are not here."""
