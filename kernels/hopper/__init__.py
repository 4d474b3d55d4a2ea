"""The SM90 tier: MXFP4 weights that stay four bits wide until they meet FP8 tensor cores in registers."""
