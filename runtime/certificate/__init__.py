"""The certificate: checks that a pair, on this machine, says with speculation what its target says alone.

Needs the extra `certify`; `python scripts/certify.py BUNDLE` runs it.
"""
