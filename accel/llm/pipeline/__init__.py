"""Language models whose layers are spread over several devices, in one process."""
