"""What a program means and where its calls run."""
