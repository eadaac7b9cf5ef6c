"""The command line, caption jobs and benchmarks: everything that knows files, folders and terminals."""
