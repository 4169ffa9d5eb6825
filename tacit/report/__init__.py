"""A run folder, or many, as one page: `collect` reads them into plain data, `page` writes the HTML, `serve` keeps it
up to date while a run goes on. The page itself (HTML, CSS, JavaScript) lies in `static/`."""
