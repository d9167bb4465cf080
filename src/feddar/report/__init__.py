"""Output for people: tables on the terminal, Markdown, the HTML page and figures."""
