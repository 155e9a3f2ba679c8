# SPDX-License-Identifier: Apache-2.0
"""Load on a namespace, measured and drawn."""
