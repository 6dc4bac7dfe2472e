"""`python -m pdxfer.daemon prefill|decode ...`: a daemon without its installed command."""

import sys

from pdxfer.daemon.run import main

if len(sys.argv) < 2 or sys.argv[1] not in {"prefill", "decode"}:
    sys.exit("usage: python -m pdxfer.daemon prefill|decode [settings]")
sys.exit(main(sys.argv[1], sys.argv[2:]))
