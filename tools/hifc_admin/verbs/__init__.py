# SPDX-License-Identifier: Apache-2.0
"""The verbs of hifc-admin: what each takes, does and shows."""
