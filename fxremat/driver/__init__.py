"""From a user's call to compiled graphs: options, stages in order, reports, caches."""
