"""What ranks that divide a sequence compute together inside of a block."""
