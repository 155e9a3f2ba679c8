# SPDX-License-Identifier: Apache-2.0
"""The kernels of native/, on a GPU through CuPy or on the host, and what is made of them."""
