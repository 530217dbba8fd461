"""What accel knows of transformers, diffusers and accelerate by name; found by role where it can be."""
