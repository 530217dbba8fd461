"""Models with encoders: of texts and images, of pictures in prompts, and of speech."""
