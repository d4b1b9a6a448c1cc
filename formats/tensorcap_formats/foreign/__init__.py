"""Files of other tools, read as archives; and dumps written for them."""
