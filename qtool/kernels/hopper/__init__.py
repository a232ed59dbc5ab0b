"""GEMMs by Hopper's integer wgmma (sm_90a)."""
