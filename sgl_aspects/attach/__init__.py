"""Attach to an engine that already runs, in all its processes, and detach again.

process_tree  the processes of an engine           permissions  why one of them cannot be attached to
injection     runs a file of ours in a process     ptrace       by one write of its main thread's registers
dormant       the same in a prepared process       elf          what is mapped into a process
package       what is brought along for it         entry        runs there first: imports
agent         runs there: weaves, and undoes it   operation    all of it, from the command's side
guard         detaches when the command was killed
"""
