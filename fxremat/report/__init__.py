"""What a user is told of a plan: tables, pages, snapshots, traces."""
