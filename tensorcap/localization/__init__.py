"""Who is guilty: witnesses of each module's own error, what they accuse, and what the error curves show."""
