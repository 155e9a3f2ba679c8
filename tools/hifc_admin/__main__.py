# SPDX-License-Identifier: Apache-2.0
"""python -m hifc_admin, the same as hifc-admin."""

import sys

from hifc_admin.main import main

sys.exit(main())
