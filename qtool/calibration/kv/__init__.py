"""The KV cache in calibration."""
