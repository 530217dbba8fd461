"""Between two steps of generate(): hooks that meet it, the next step begun early, and a loop that runs ahead of it."""
