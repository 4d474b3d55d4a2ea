"""DeepGEMM MegaMoE (`sgl-deep-gemm` 0.1.7) as judge, in parts that need less and less:

===================  ==================================================================================================
`sm100_fused`        the fused SM100 kernels, live: a Blackwell GPU, nvcc, an installed package that loads (`package`)
`sm90_fused`         the fused SM90 kernel, live: a Hopper GPU, nvcc, an installed package that loads
`device_code`        the pre-dispatch kernels and the requantization scales, from the headers: any GPU from sm_89, nvcc
`host_code`          buffer sizes and views, from the compiled module: Linux on x86-64, torch 2.13 without CUDA
`python_helpers`     weight transforms and host quantizers: any machine
`upstream`           where the files of the wheel are
===================  ==================================================================================================

Each has a `load` that raises `OracleUnavailable`, whose message is the reason.
"""
