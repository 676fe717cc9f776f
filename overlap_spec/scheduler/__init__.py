"""The scheduler: queueing, pages, planning and committing steps. No torch."""
