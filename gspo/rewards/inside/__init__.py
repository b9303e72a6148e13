"""What runs behind the walls of the sandbox. Standard library only, and nothing of gspo: these files are started as a
package of their own, `python -I -S`, in a process that sees nothing else of this one."""
