"""`python -m pdxfer.cli`: the command `pdxfer` without its installed script."""

import sys

from pdxfer.cli.main import main

sys.exit(main())
