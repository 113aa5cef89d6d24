"""Tensors: their bytes, copied, cut, encoded and digested. Imports `parallel` and `hardware`."""
