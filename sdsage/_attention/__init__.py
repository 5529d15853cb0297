"""One attention alone, computed by the engine and compared with float64: what `sdsage verify` and `bench attn` are made of."""
