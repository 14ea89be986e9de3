"""Attaching to all processes of a running engine, and detaching.

process_tree  finds the processes of an engine
rights        whether a process may be attached to: by this user, by root for another
delegation    runs root's command as the user whose process it is
debugging     reads and writes memory here, or by root's process on request
injection     runs a script in a process
ptrace        calls a function in a process, by one write of its main thread's registers
elf           reads the files mapped into a process
package       copies the modules for a process
agent         runs in the process: weaves, and removes everything
operation     attaches and detaches, in the command's process, and in its guard's once that is gone
"""
