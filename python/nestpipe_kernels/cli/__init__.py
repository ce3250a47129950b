"""The `nestpipe` command: `main` parses and dispatches, every subcommand has a module."""
