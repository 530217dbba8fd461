"""A small stock run of a language model, recorded: which modules were called with what."""
