"""What docs/measurements/compatibility.md is made of: every model of two libraries, built tiny and compared."""
