"""Which plan holds for a call of a block: kinds of calls and blocks, the code they run, and the tensors they hold."""
