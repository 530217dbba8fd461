"""`accel bench`: denoisers and decoders at published sizes, and saved pipelines and models of the user's own."""
