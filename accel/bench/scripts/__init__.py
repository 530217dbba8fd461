"""Scripts as people write them, each run whole, stock and with accel in turns: `accel bench scripts`."""
