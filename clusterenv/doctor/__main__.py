"""Run as ``python -m clusterenv.doctor``."""

import sys

from clusterenv.doctor.examination import main

sys.exit(main())
