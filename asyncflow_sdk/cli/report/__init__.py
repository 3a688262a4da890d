"""The report page: its figures, its template, and the record of a run that it shows."""
