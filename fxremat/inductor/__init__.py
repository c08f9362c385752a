"""All that is known of Inductor: what it fuses, materialises and orders, and what its code allocates."""
