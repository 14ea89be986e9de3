"""Attach to an engine that already runs, in all its processes, and let go of it.

process_tree  which processes belong to an engine      permissions  why one of them cannot be attached to
injection     a file of ours runs in another process   ptrace       by one write of its main thread's registers
elf           what is mapped there                     package      what is brought along for it
entry         runs there first: imports                agent        runs there: weaves, and takes it all back
operation     the whole of it, from the command's side guard        lets go when the command was killed
"""
