"""`python -m cspd`, as from a checkout where nothing is installed."""

from __future__ import annotations

import sys

from cspd.cli import main

sys.exit(main())
