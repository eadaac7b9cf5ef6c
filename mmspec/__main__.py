"""`python -m mmspec`, and what `accelerate launch -m mmspec` starts."""

from mmspec.app.cli import main

raise SystemExit(main())
