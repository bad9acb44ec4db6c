"""The command line: one file for each command or group of commands, each with an ``app`` that ``main`` adds."""
