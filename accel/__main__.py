"""`python -m accel`, the same as the command `accel`."""

from accel.commands.app import app

if __name__ == "__main__":
    app(prog_name="accel")
