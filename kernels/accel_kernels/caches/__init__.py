"""What processes find out and keep on disk, for each other and for later ones."""
