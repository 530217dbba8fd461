"""Fusing layers, for images and text: stacked linears, norms, the layout of images, what is kept within a forward."""
