"""Row programs: what stands between two matrix products, in one pass over memory."""
