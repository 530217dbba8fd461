"""The step cache, lossy: deep layers of a UNet computed in some of the steps."""
