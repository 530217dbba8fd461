"""Many copies of a language model behind one server, for an engine that runs them, such as Ray Serve."""
