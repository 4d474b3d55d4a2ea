"""The SM90 tier: MXFP4 weights that stay four bits wide until FP8 tensor cores take them from registers, and E4M3."""
