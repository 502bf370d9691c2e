"""The steps and metrics of a program that does not report them: read from its lines and its event
files, and never at the cost of the program. What cannot be read is left out.
"""
