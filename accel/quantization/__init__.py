"""What a quantized linear is: schemes, rounding to nearest, the module, activations in 8 bits, the swap."""
