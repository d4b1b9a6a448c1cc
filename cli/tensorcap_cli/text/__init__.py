"""What the commands print: a result of the library comes in, lines of text or JSON go out.

`output` has what all share (tables, numbers, sizes), `progress` shows how far a long task is, and the other
modules print one kind of result each.
"""
