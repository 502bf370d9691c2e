"""Plug-ins of other frameworks: each lets a program of that framework run under Holdfast as it is.

A plug-in imports its framework when it is used, never before. Outside of Holdfast it has no effect
on the program (`holdfast_workers.programs.attachment`).
"""
