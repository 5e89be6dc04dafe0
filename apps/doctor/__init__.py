"""Checks of this machine and its installation, each with a fix.

Every check takes what it judges and returns findings; `examination` lists the checks. `machine_profile` measures;
nothing here prints.
"""
