"""`python -m mmspec`, and what `accelerate launch -m mmspec` starts."""

from mmspec.app.cli.main import main

raise SystemExit(main())
