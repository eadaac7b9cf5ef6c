"""Entry point of `python -m mmspec` and `accelerate launch -m mmspec`."""

from mmspec.app.cli.main import main

raise SystemExit(main())
