"""Names: rules of ecosystems, site templates, and what differs between two module trees."""
