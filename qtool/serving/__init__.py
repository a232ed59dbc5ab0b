"""Native checkpoints in serving engines: the code that engines share, and a plugin for each."""
