"""`accel bench` and its kin: stock beside accel, of images, of text, in batches, whole scripts, and until ready."""
