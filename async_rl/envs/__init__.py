"""Tasks, environments and rewards: what is asked, how an answer comes about, what it is worth."""
