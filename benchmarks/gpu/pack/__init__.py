"""What a GPU machine without a network needs: collected here, unpacked there."""
