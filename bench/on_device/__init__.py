"""Cases on an accelerator: `nestpipe bench --device cuda`, each a module with `works(parsed, backend)`."""
