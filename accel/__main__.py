"""`python -m accel`, the same as the command `accel`."""

from accel.cli import app

if __name__ == "__main__":
    app(prog_name="accel")
