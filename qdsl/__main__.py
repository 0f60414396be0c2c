import sys

from qdsl.cli import main

sys.exit(main())
