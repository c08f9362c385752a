"""What no plan undercuts: bounds, the exact search, the mixed-integer programme."""
