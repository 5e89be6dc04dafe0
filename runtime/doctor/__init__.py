"""What is well with this machine and its installation, what is not, and the line that mends it.

Every check takes what it judges and returns findings; `examination` knows which there are. Measures through
`machine_profile`; prints nothing.
"""
