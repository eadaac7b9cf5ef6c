"""`python -m research.bench`."""

import signal

from research.bench.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a bench that is killed prints what it has
    raise SystemExit(main())
