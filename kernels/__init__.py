"""The Triton kernels, one family per file; loaded on first use, never by `import megamoe`."""
