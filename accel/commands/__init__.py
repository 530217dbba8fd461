"""The commands of `accel`, one a file. Whatever loads model libraries is imported inside the command that needs it."""
