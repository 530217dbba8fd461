"""What people hand to `accel.optimize`."""
