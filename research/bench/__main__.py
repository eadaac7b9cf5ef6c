"""`python -m research.bench`."""

from research.bench.command import main

raise SystemExit(main())
