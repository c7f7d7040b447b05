"""`python -m kalos_ctx.conformance MODULE:FACTORY`."""

import sys

from kalos_ctx.conformance.runner import main

sys.exit(main())
