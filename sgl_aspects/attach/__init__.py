"""Attaching to all processes of a running engine, and detaching.

process_tree  the processes of an engine           permissions  why one of them cannot be attached to
injection     runs a script in a process           ptrace       by one write of its main thread's registers
dormant       the same in a prepared process       elf          what is mapped into a process package the
modules copied for it           entry        runs there first: imports agent         runs there: weaves, and
undoes it   operation    the command's side guard         detaches after the command was killed
"""
