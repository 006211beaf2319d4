"""What stands on the library and is not imported by it: simulate, plan, analyse, plot, and the command line."""
