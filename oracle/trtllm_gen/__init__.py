"""trtllm-gen's MoE as FlashInfer 0.6.18 ships it, as judge: layout functions on any machine, kernels on Blackwell."""
