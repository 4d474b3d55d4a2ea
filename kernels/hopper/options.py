"""What a tile means for a launch."""

from __future__ import annotations

from megamoe.kernels.hopper.config import HopperTile


def constexprs(tile: HopperTile) -> dict[str, int]:
    """Registers per thread: 12 warps share what the CTA gets, the producer needs few."""
    consumer = 104 if tile.ctas_per_sm == 2 else 240
    n0, n1, n2 = tile.chunks
    return {
        "N0": n0, "N1": n1, "N2": n2, "STAGES": tile.stages,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": 24,
    }  # fmt: skip


def launch_options(tile: HopperTile) -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": 80} if tile.ctas_per_sm == 2 else {"num_warps": 4}
