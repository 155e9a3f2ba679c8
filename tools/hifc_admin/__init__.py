# SPDX-License-Identifier: Apache-2.0
"""hifc-admin, the command line of HiFC: one module per group of verbs.

main.py parses and dispatches; a verb is a function from its arguments to a `result.Result`; nothing
but main.py prints or exits. What a verb cannot do it raises as `result.Failure`.
"""
