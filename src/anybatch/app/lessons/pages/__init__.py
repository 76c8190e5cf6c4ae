"""The nine lessons: their texts, their widgets, and the page that holds them."""
