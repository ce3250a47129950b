"""Operations: one folder each, with checks and dispatch in `__init__`, plain PyTorch in `reference`, and `native`."""
