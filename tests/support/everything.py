"""Whether every row of the long tables runs, as in `make test-all`."""

import os

EVERYTHING = bool(os.environ.get("ACCEL_TEST_EVERYTHING"))
