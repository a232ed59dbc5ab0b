"""Native checkpoints in serving engines: what both engines share, and a plugin for each."""
