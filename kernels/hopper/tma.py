"""TMA through Gluon, whose names changed between Triton 3.6 and 3.9."""

from triton.experimental.gluon.language.nvidia.hopper import tma

# A box of global memory to shared memory, signalled by an mbarrier.
fetch_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
