"""What changes from run to run: two results side by side, and nights of many cases in one store."""
