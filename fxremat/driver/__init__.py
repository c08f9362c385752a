"""From a user's call to compiled graphs: the stages in order, policies, caches."""
