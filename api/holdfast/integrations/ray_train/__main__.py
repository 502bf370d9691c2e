"""`python -m holdfast.integrations.ray_train module:function`: one rank."""

from __future__ import annotations

import sys

from holdfast.integrations.ray_train.rank_process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
