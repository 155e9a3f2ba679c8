# SPDX-License-Identifier: Apache-2.0
"""Counters and gauges of an engine, and where they are shown."""
