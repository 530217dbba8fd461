"""The step cache, lossy: deep layers of a UNet, or blocks of a transformer, computed in some of the steps."""
