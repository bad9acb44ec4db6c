"""A shard: some clients' data, what they keep, and the block simulator that runs tasks for them."""
