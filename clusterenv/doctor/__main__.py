"""Run as ``python -m clusterenv.doctor``."""

import sys

from clusterenv.doctor import main

sys.exit(main())
