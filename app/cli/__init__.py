"""The `mmspec` command: sub-commands and their parsers."""
