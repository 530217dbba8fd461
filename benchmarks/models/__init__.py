"""Models at published sizes in this project's settings; what a user runs on his own model is `accel bench`."""
