"""The block loop: blocks stream from the source through the device to the writer."""
