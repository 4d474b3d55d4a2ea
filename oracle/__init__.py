"""References and adapters that judge the kernels."""
