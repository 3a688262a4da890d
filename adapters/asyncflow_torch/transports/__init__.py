"""The transports `dist` and `cuda-ipc`."""
