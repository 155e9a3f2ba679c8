# SPDX-License-Identifier: Apache-2.0
"""What every other package may use: checks of arguments, sizes, steps that belong together."""
