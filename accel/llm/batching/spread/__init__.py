"""Continuous batching over layers that are spread over devices: groups of requests, each on another one."""
