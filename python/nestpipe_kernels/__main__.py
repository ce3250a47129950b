"""`python -m nestpipe_kernels`: the same as the console script `nestpipe`."""

import sys

from nestpipe_kernels.cli.main import main

sys.exit(main())
