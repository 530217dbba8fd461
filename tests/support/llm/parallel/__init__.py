"""What ranks that share a language model are told to do in tests, on all of them at once."""
