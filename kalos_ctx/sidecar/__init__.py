"""The same calls from other processes: `serve` runs a sidecar, `connect` talks to one."""
