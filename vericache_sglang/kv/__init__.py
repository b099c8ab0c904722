"""Where the KV of every request is: device slots, staging buffer, host memory."""
